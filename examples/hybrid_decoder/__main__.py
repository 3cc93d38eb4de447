"""`python examples/hybrid_decoder`, or `python -m examples.hybrid_decoder`, from an installed checkout."""

from examples.hybrid_decoder.command import main

main(prog_name="hybrid_decoder")
