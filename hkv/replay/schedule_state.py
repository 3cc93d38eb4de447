"""State of a compiled schedule, whatever cache it drives: the trace, requests on their way, the outcome of each."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from hkv.state.flat_arrays import FlatArrays
from hkv.state.loops import Scalar

Number = enum.IntEnum(
    "Number",
    (
        "STEP_TOKENS",
        "DECODE_TOKENS",
        "MAX_RUNNING",
        "LOOKAHEAD",
        "MAX_MODEL_LEN",
        "CLOSED_LOOP",
        "REQUESTS",
        "KEPT_BLOCK",
        "KEPT_EAGLE",
        "DIAGNOSE",
        "KEPT_HASH",
        "STEPS",
        "UNTIL",
    ),
    start=0,
)
"""Columns of `Trace.numbers`.

The first six are as in `Schedule`. REQUESTS: requests of the trace. KEPT_BLOCK and KEPT_EAGLE:
`Chunking.block_size` and `Chunking.eagle`. DIAGNOSE: whether to find out why hits ended. KEPT_HASH:
`Chunking.hash_block_size`. STEPS: most steps of a dispatch, where that is less than its room; 0 for none. UNTIL: the
step before which a dispatch ends; 0 for none.
"""


class Arriving(enum.IntEnum):
    """Columns of `Trace.requests`."""

    STEP = 0
    PROMPT = 1
    OUTPUT = 2
    KEY_START = 3
    ASKED = 4
    """The boundary up to which it is asked why its hit ended."""


ARRIVING = 5
"""Columns of `Trace.requests`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """Read-only input of a replay.

    Attributes:
      requests: int32[requests + 1, 5], a row a request, columns `Arriving`; the last row is spare.
      keys: int32[keys], every request's prefix keys, one request after the other, output included.
      numbers: int32[13], `Number`.
    """

    requests: jax.Array
    keys: jax.Array
    numbers: jax.Array

    def number(self, number: Number) -> Scalar:
        """One of the numbers."""
        return self.numbers[int(number)]

    @property
    def until(self) -> Scalar:
        """The step before which a dispatch ends; one that no replay reaches, for none."""
        until = self.number(Number.UNTIL)
        return jnp.where(until > 0, until, jnp.iinfo(jnp.int32).max)

    def request(self, index: Scalar, column: Arriving) -> Scalar:
        """A column of a request of the trace, whose index may be one too large."""
        return self.requests.reshape(-1)[index.astype(jnp.uint32) * ARRIVING + int(column)]

    def too_long(self, index: Scalar) -> Scalar:
        """True if a request is longer than the model allows."""
        prompt, most = self.request(index, Arriving.PROMPT), self.number(Number.MAX_MODEL_LEN)
        return (prompt > most) | (self.request(index, Arriving.OUTPUT) > most - prompt)


class Running(enum.IntEnum):
    """Columns of `ScheduleResident.running_words`: a request that holds a slot. Lengths are in tokens."""

    REQUEST = 0
    """Number of the request in the trace."""
    COMPUTED = 1
    TOKENS = 2
    NOOP_UNTIL = 3
    """Tokens up to which an allocation would change nothing but counts."""
    SCHEDULED = 4
    """Tokens that this step computes, those of a hit included."""
    SHARED_BOUNDARY = 5
    """`shared_prefix` of the lookup that admitted it (vLLM's `Request.shared_prefix_boundary`)."""
    CAME = 6
    """Tokens with which it was admitted, where the cache has a second tier; else 0."""


RUNNING_COLUMNS = 8
"""Columns of `ScheduleResident.running_words`."""


class RequestResult(enum.IntEnum):
    """Columns of `ScheduleResident.request_results`; `ScheduleArrays` has indices of those that follow."""

    HIT = 0
    ADMITTED = 1
    ENDED = 2
    OUTCOME = 3
    PREEMPTIONS = 4
    RECOMPUTED = 5
    RECOVERED = 6
    TOKENS = 7
    """Tokens it has while it waits."""


RESULT_COLUMNS = 8
"""Columns of `ScheduleResident.request_results` before the reasons by group, a length and the evictions by group."""


class Ending(enum.IntEnum):
    """Values of `RequestResult.OUTCOME`."""

    NONE = 0
    FINISHED = 1
    NEVER_FITS = 2
    TOO_LONG = 3


SAMPLE = 8
"""Columns of `ScheduleResident.samples`: the fields of `StepRecords`, in order."""


class Mode(enum.IntEnum):
    """Next action of a compiled replay."""

    BEGIN = 0
    """Begin a step."""
    GROW = 1
    """Give running requests their next tokens."""
    ASK = 2
    """ALLOCATE for the running request at the cursor."""
    PREEMPT = 3
    """FREE the request that was admitted last."""
    ADMIT = 4
    """Look at the head of the queue."""
    REQUEST = 5
    """REQUEST for the head of the queue."""
    FIND = 6
    """LOOKUP."""
    TAKE = 7
    """ALLOCATE for it."""
    RECORD = 8
    """Every request has its blocks."""
    COMPUTE = 9
    """Compute the step."""
    FINISH = 10
    """FREE the request at the cursor, whose last token is out."""
    SETTLE = 11
    """The request at the cursor, of which a second tier loaded a prefix, enters it into the cache."""
    HELD = 12
    """ALLOCATE for it."""
    GIVE_UP = 13
    """FREE it: it will never fit."""
    REST = 14
    """Nothing waits or runs, and the second tier has not yet been notified of all ended requests."""
    DONE = 15
    FAILED = 16
    """The cache refused something for a reason that a replay should not give it."""


class Machine(NamedTuple):
    """The scalars of a schedule, between two operations.

    Attributes:
      mode: `Mode`.
      step: the step's number.
      cursor: place in the list of running requests that is looked at.
      kept: COMPUTE: requests that stay in the list so far.
      active: running requests.
      budget: tokens that the step may still compute.
      refused: whether a running request was refused blocks in this step.
      arrived: requests of the trace that have arrived.
      taken: requests of the trace that have left the queue, or were too long for it.
      stacked: preempted requests at the front of the queue.
      waiting: requests in the queue.
      head: the request at the head of the queue.
      candidate_request: the request that holds the candidate's slot, or -1.
      candidate: slot for the request that is to be admitted next.
      vacant: slots in `ScheduleResident.vacant`.
      asked: slot of the running request that an operation is about.
      new: tokens to compute for it, or for the candidate.
      hit: tokens found for the candidate.
      prompt_tokens, hit_tokens, put_off, preemptions: as in `StepRecords`, of this step.
      samples: steps recorded in this dispatch.
      ended: requests that finished or were refused for good.
      status: status of an operation that failed.
    """

    mode: Scalar
    step: Scalar
    cursor: Scalar
    kept: Scalar
    active: Scalar
    budget: Scalar
    refused: Scalar
    arrived: Scalar
    taken: Scalar
    stacked: Scalar
    waiting: Scalar
    head: Scalar
    candidate_request: Scalar
    candidate: Scalar
    vacant: Scalar
    asked: Scalar
    new: Scalar
    hit: Scalar
    prompt_tokens: Scalar
    hit_tokens: Scalar
    put_off: Scalar
    preemptions: Scalar
    samples: Scalar
    ended: Scalar
    status: Scalar

    def when(self, condition: Scalar, **changes: Any) -> Machine:
        """The machine with some scalars replaced where the condition holds."""
        chosen = {name: jnp.where(condition, value, getattr(self, name)) for name, value in changes.items()}
        return self._replace(**chosen)

    def at(self, mode: Mode) -> Scalar:
        """True if that is the next action."""
        return self.mode == int(mode)


SCHEDULE_ARRAYS = ("running_words", "order", "vacant", "stack", "request_results", "samples")
"""Names of the arrays of `ScheduleArrays`."""


def empty_arrays(slots: int, spare: int, groups: int, requests: int, steps: int) -> dict[str, Any]:
    """The arrays and the machine of a schedule in which nothing happened, as NumPy arrays, by name."""
    machine = np.zeros(len(Machine._fields), np.int32)
    machine[Machine._fields.index("candidate_request")] = -1
    machine[Machine._fields.index("vacant")] = slots - 1
    vacant = np.zeros(spare + 1, np.int32)
    vacant[: slots - 1] = np.arange(slots - 1, 0, -1)
    return {
        "running_words": np.zeros((spare + 1, RUNNING_COLUMNS), np.int32),
        "order": np.zeros(spare + 1, np.int32),
        "vacant": vacant,
        "stack": np.zeros(requests + 1, np.int32),
        "request_results": np.zeros((requests + 1, RESULT_COLUMNS + 1 + 2 * groups), np.int32),
        "samples": np.zeros((steps + 1, SAMPLE), np.int32),
        "machine": machine,
    }


def flat(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Arrays of a value, by name, as loops carry them: of one dimension."""
    return {name: getattr(value, name).reshape(-1) for name in names}


def shaped(work: Any, like: Any, names: Iterable[str]) -> dict[str, Any]:
    """Arrays of a workspace, by name, in the shapes that they have in another value."""
    return {name: getattr(work, name).reshape(getattr(like, name).shape) for name in names}


@dataclasses.dataclass(frozen=True)
class ScheduleResident:
    """State of a schedule on the device between two dispatches. Every array but the last ends in a spare row.

    Attributes:
      running_words: int32[slots + 1, 8], `Running` of each request slot.
      order: int32[slots + 1], slots of the running requests in order of admission.
      vacant: int32[slots + 1], a stack of slots that hold no request.
      stack: int32[requests + 1], preempted requests, the next to be admitted last.
      request_results: int32[requests + 1, 9 + 2 * groups], `RequestResult` of each request of the trace, why its hit
        ended, by group, up to where its blocks were computed, and, by group, what the key table says of an eviction.
      samples: int32[steps + 1, 8], the steps of one dispatch.
      machine: int32[25], `Machine`.
    """

    running_words: jax.Array
    order: jax.Array
    vacant: jax.Array
    stack: jax.Array
    request_results: jax.Array
    samples: jax.Array
    machine: jax.Array


@dataclasses.dataclass(frozen=True)
class ScheduleArrays(FlatArrays):
    """The arrays of a schedule in a workspace, flat; the first three end with the slot that no request has.

    Attributes:
      running_words, order, vacant, stack, request_results, samples: as in `ScheduleResident`.
    """

    running_words: jax.Array
    order: jax.Array
    vacant: jax.Array
    stack: jax.Array
    request_results: jax.Array
    samples: jax.Array

    def running_word(self, slot: Scalar, column: Running) -> Scalar:
        """Index into `running_words`."""
        return slot * RUNNING_COLUMNS + int(column)

    def request_result(self, request: Any, column: Any) -> Scalar:
        """Index into `request_results`."""
        return request * (RESULT_COLUMNS + 1 + 2 * self.sizes.buckets.groups) + column

    def computed(self, request: Any) -> Scalar:
        """Index into `request_results`: tokens up to which the blocks were computed that a request asked for."""
        return self.request_result(request, RESULT_COLUMNS + self.sizes.buckets.groups)

    def eviction(self, request: Any, group: Any) -> Scalar:
        """Index into `request_results`: value of the key table for an evicted block that a group lacked; else 0."""
        return self.computed(request) + 1 + group

    def get_running(self, slot: Scalar, *columns: Running) -> tuple[Scalar, ...]:
        """Columns of the running request in a slot."""
        return tuple(self.read("running_words", self.running_word(slot, column)) for column in columns)

    def get_result(self, request: Scalar, *columns: RequestResult) -> tuple[Scalar, ...]:
        """Columns of a request's result."""
        return tuple(self.read("request_results", self.request_result(request, int(column))) for column in columns)

    def set_running(self, slot: Scalar, **values: Any) -> Self:
        """The workspace with columns of the request in a slot replaced, named in small letters."""
        for name, value in values.items():
            self = self.write("running_words", value, self.running_word(slot, Running[name.upper()]))
        return self

    def set_result(self, request: Scalar, **values: Any) -> Self:
        """The workspace with columns of a request's result replaced, named in small letters."""
        for name, value in values.items():
            self = self.write("request_results", value, self.request_result(request, int(RequestResult[name.upper()])))
        return self

    @property
    def spare_request(self) -> int:
        """A request that the trace does not have."""
        return self.stack.shape[0] - 1
