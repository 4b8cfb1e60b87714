"""What can go wrong, as one tree.

HoldfastError
├── UsageError            bad input: refused before anything starts; the message says what to do
│   └── StateChanged      the script changes protected state outside of the commit; no restart would help
├── ProtocolError         a frame or message that this version does not understand
├── StateError            training state that cannot be captured, sent or loaded
│   ├── ChecksumError     bytes arrived that are not the bytes that were sent
│   └── UnreadError       a checkpoint of which bytes cannot be had; an older one may do
├── DataError             a data set that cannot be built, fetched or read
├── TierError             a checkpoint tier cannot be read or written; training goes on without it
│   ├── SlotsTaken        snapshots before this one are still on their way; later there is room again
│   └── MemoryShort       one more snapshot does not fit into this node's memory
├── NonFiniteGradient     the reduced gradient holds NaN or Inf; the step is retried
├── StepFault             a step cannot be finished in this generation; swallowed by `with step`
│   ├── GenerationBroken  the coordinator ended the generation
│   └── CollectiveFailed  a collective with the other replicas failed: evidence, not a verdict
│       └── StateLost     what the generation was to go on from is damaged: another try would find the same
└── JobStopped            the job was asked to stop; `run.steps` ends quietly
"""


class HoldfastError(Exception):
    """Root of every error that Holdfast raises on purpose."""


class UsageError(HoldfastError):
    """Bad input. The message names the field, what was wrong with it and an example that works."""


class StateChanged(UsageError):
    """Protected state changed outside of a step's commit. Give what changes it to `step.apply(..., also=...)`."""


class ProtocolError(HoldfastError):
    """A peer sent something that this version does not understand. Run one version on all nodes."""


class StateError(HoldfastError):
    """Protected state cannot be captured, sent or loaded; the message names the object and the path."""


class ChecksumError(StateError):
    """Bytes differ from what their checksum says. The transfer is repeated from another donor."""


class UnreadError(StateError):
    """A checkpoint cannot be read whole. An older one, or another tier's, may do."""


class DataError(HoldfastError):
    """A data set cannot be built, fetched or read, or is not as it was written. The message names the file or sample."""


class TierError(HoldfastError):
    """A tier of checkpoints is full, not there, not permitted, or does not answer. The message says what to do."""


class SlotsTaken(TierError):
    """The memory for a shard holds snapshots that are still needed. The next one may find room."""


class MemoryShort(TierError):
    """There is no memory for one more snapshot. Give the job more of it (`--snapshot-memory`), or save less often."""


class NonFiniteGradient(HoldfastError):
    """The gradient holds NaN or Inf. Lower the learning rate, clip, or look at the data of this step.

    own: this rank's own part of it does, or of the loss.
    """

    def __init__(self, message: str, own: bool = False) -> None:
        super().__init__(message)
        self.own = own


class StepFault(HoldfastError):
    """The step in flight cannot be finished in this generation. `with step` swallows it and recovers."""


class GenerationBroken(StepFault):
    """The coordinator ended the generation that this step belongs to."""


class CollectiveFailed(StepFault):
    """A collective with the other replicas raised; the coordinator decides who is at fault."""


class StateLost(CollectiveFailed):
    """The checkpoint that the generation was to go on from is damaged; the coordinator takes an older one."""


class JobStopped(HoldfastError):
    """The job was asked to stop. Raised inside `run.steps`, never seen by a script that iterates it."""
