"""Serves prompts of tokens with a checkpoint: python -m examples.serve tests/data/serve/gemma3 1,2,3,4 1,2,3,9."""

from __future__ import annotations

import argparse
import pathlib

from examples.serve.engine import Engine, Request


def main() -> None:
    """Prints the greedy continuation of each prompt, and what its cache found."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a checkpoint: config.json and *.safetensors")
    parser.add_argument("prompts", nargs="+", help="token ids, with commas")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate")
    parser.add_argument("--memory", type=int, default=1 << 22, help="bytes of the cache")
    parser.add_argument("--block-size", type=int, default=4, help="tokens of a block")
    arguments = parser.parse_args()
    engine = Engine(arguments.folder, arguments.memory, block_size=arguments.block_size)
    requests = [Request([int(token) for token in prompt.split(",")], arguments.new) for prompt in arguments.prompts]
    for request in requests:  # one after the other, so that later ones find what earlier ones left
        length = len(request.tokens)
        engine.serve([request])
        print(f"{length} tokens, {request.hits[0]} of them cached -> {','.join(map(str, request.tokens[length:]))}")
    print(f"{engine.plan.num_blocks:,} blocks in groups of {', '.join(engine.plan.groups['kind'])}")


if __name__ == "__main__":
    main()
