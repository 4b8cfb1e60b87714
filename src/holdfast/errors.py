"""What can go wrong, as one tree.

HoldfastError
├── UsageError            bad input: refused before anything starts; the message says what to do
│   └── StateChanged      the script changes protected state outside of a commit; a restart does not help
├── Damaged               bytes of a file or of somebody else that cannot be read; most callers raise what they promise
├── ProtocolError         a frame or message that this version does not understand
├── StateError            training state that cannot be captured, sent or loaded
│   ├── ChecksumError     received bytes differ from the bytes that were sent
│   └── UnreadError       a checkpoint cannot be read completely; an older one may be usable
├── DataError             a data set that cannot be built, fetched or read
├── TierError             a checkpoint tier cannot be read or written; training goes on without it
│   ├── SlotsTaken        earlier snapshots are still being stored; there will be room later
│   └── MemoryShort       another snapshot does not fit into this node's memory
├── NonFiniteGradient     the reduced gradient holds NaN or Inf; the step is retried
├── StepFault             a step cannot be completed in this generation; swallowed by `with step`
│   ├── GenerationBroken  the coordinator ended the generation
│   └── CollectiveFault   a collective with the other replicas failed: evidence, not a verdict
│       └── StateLost     the state to restore is damaged; another attempt would fail in the same way
└── JobStopped            the job ends before the last step; raised by `run.steps`, so nothing after the loop runs
"""


class HoldfastError(Exception):
    """Root of every error that Holdfast raises on purpose."""


class UsageError(HoldfastError):
    """Bad input. The message names the field, what was wrong with it and an example that works.

    A worker's ends the job at once if the job has not trained yet. So it is for what no further attempt can change.
    """


class StateChanged(UsageError):
    """Protected state changed outside of a step's commit. Give what changes it to `step.apply(..., also=...)`."""


class Damaged(HoldfastError):
    """Bytes that this process did not make cannot be read; the message names them. See `protocol.wire.decoding`."""


class ProtocolError(HoldfastError):
    """A peer sent something that this version does not understand. Run one version on all nodes."""


class StateError(HoldfastError):
    """Protected state cannot be captured, sent or loaded; the message names the object and the path."""


class ChecksumError(StateError):
    """Bytes differ from what their checksum says. The transfer is repeated from another donor."""


class UnreadError(StateError):
    """A checkpoint cannot be read completely. An older one, or one on another tier, may be usable."""


class DataError(HoldfastError):
    """A data set cannot be built, fetched or read, or is not as it was written. The message names the file or sample."""


class TierError(HoldfastError):
    """A checkpoint tier is full, missing, not accessible, or does not answer. The message says what to do."""


class SlotsTaken(TierError):
    """The memory for a shard holds snapshots that are still needed. There may be room for the next one."""


class MemoryShort(TierError):
    """There is no memory for another snapshot. Give the job more (`--snapshot-memory`), or save less often."""


class NonFiniteGradient(HoldfastError):
    """The gradient holds NaN or Inf. Lower the learning rate, clip, or look at the data of this step.

    own: this rank's own part of the gradient or of the loss is not finite.
    """

    def __init__(self, message: str, own: bool = False) -> None:
        super().__init__(message)
        self.own = own


class StepFault(HoldfastError):
    """The current step cannot be completed in this generation. `with step` swallows it and recovers."""


class GenerationBroken(StepFault):
    """The coordinator ended the generation that this step belongs to."""


class CollectiveFault(StepFault):
    """A collective with the other replicas raised; the coordinator decides who is at fault."""


class GradientMismatch(CollectiveFault):
    """A micro-batch that was computed twice gave other bits; the coordinator decides who is at fault."""


class StateLost(CollectiveFault):
    """The state that this generation was to start from is damaged. The coordinator chooses an older one."""


class JobStopped(HoldfastError):
    """`run.steps` ends here although `until` is not reached: the job was asked to stop (`holdfast stop`, Ctrl-C, a time limit, a
    preemption), it failed elsewhere, or this worker's node is drained and another one takes its place.

    It leaves the loop, `trainer.train()` and `trainer.fit()`, so that nothing that stands after them takes an unfinished
    model for a finished one. The state needs no help: it is saved or handed over where it is to go on. At the end of the
    script it is no error. Catch it for what only the script knows, and raise it again.
    """
