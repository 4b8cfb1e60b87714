"""Five things on their way through the sources, and through how many files and forms each of them goes.

A walk has a line for each function that holds the thing, passes it on, decides what becomes of it, or is told of it. It is the
usual path, with nothing injected and nothing failing but what the walk is about. Left out are what never sees the thing (clocks,
locks, log lines, event loops) and constructors that only keep it. The walks are:

    a gradient       of one replica at level 2, on the CPU, from its share of the step to what its agent is told of the commit
    an exit code     of a member that the kernel killed, from its wait status to the ledger and a line in the terminal
    a snapshot       of a replica, from the vote to the copy on another node, and to a manifest in a folder
    one option       `--detection`, from the command line, or a HoldfastJob, to what computes with it
    a job's YAML     without a queue, from the API server's watch to the agent of a node's pod

    train/step:Step.apply                     the function `Step.apply` in `holdfast.train.step`
        train/replica:Replica.vote            a function that it calls: it names it
        train/link:Link.send by on_send       one that it leads to by a name that stands in both of their modules: of a message,
                                              a callback, a field, a file, or an argument of a process

A line that is not indented follows from any line above it, by the name. So every line is held to the sources (`faults`).

    files   modules of the functions, and of the classes that are forms; each counts once
    forms   what holds the thing on its way: classes, and what is none ("a frame"), which has no module
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imports import Module


@dataclass(frozen=True)
class Walk:
    """One thing's way."""

    title: str
    hops: str
    """A line for each, as above."""
    forms: str
    """Separated by blanks."""
    others: tuple[str, ...]
    """Forms that are no classes."""


TO_THE_CORE = """
agent/coordinator_link:CoordinatorLink._sending by Outbox
    agent/coordinator_link:CoordinatorLink._sent
        agent/coordinator_link:Outbox.take
        agent/coordinator_link:_dated
        protocol/wire/frames:encode
        protocol/wire/frames:encode_all
        agent/coordinator_link:Outbox.sent
coordinator/service/agents:AgentConnections.talk by AgentMessage
    coordinator/service/agents:AgentConnections._on_frame
        protocol/wire/frames:Codec.decode_all
            protocol/wire/decoding:decode
        coordinator/service/agents:AgentConnections._on_message
            coordinator/service/decision_loop:DecisionLoop.handle
                coordinator/service/decision_loop:DecisionLoop._take_in
                    coordinator/service/queues:Inbox.put
coordinator/service/decision_loop:DecisionLoop.decide_all by Inbox
    coordinator/service/queues:Inbox.take
    coordinator/service/queues:QueuedEvent.aged
    coordinator/service/decision_loop:DecisionLoop._decide
        coordinator/machine:Core.handle_all
            coordinator/machine:Core._takes
                coordinator/machine:Core._dispatch
                    coordinator/machine:Core._node_says
                        coordinator/membership/nodes:heard
        coordinator/service/decision_loop:DecisionLoop._batch
            coordinator/service/decision_loop:DecisionLoop._entry
        coordinator/service/decision_loop:DecisionLoop._written
            coordinator/service/ledger:Ledger.write
                coordinator/service/ledger:LedgerCopies.on_batch by also
                coordinator/service/ledger:Ledger._write_all
                    coordinator/service/ledger:Ledger._try
                        coordinator/service/ledger:SideThread.do
                        coordinator/service/ledger:Ledger._put
                            coordinator/service/store:Store.write
        coordinator/service/decision_loop:DecisionLoop._carry_out
            coordinator/service/decision_loop:DecisionLoop.do
                coordinator/service/queues:AgentLines.send
                    protocol/wire/frames:encode
            coordinator/service/queues:AgentLines.together
                coordinator/service/queues:AgentLines._flush
                    protocol/wire/frames:frames_of
                    protocol/wire/frames:encode_all
"""
"""What an agent tells the coordinator, until it is decided, written and answered: a part of two walks."""

GRADIENT = Walk(
    title="a gradient",
    hops="""
train/run:Run.steps
    train/step:Step
train/step:Step.__iter__ by Step
    train/step:Step._take_share
        train/replica:Replica.take_share
            train/place:Place.share
                train/place:Place._of_generation
                    train/place:share_of
            train/reduction:GradientSum.expect
train/step:Step.backward by Step
    train/step:Step._say_weight
        train/replica:Replica.send_weights
            train/control_channel:ControlChannel.send
    train/replica:Replica.backward
        train/reduction:GradientSum.before_backward
        train/reduction:GradientSum.last
        train/replica:Replica._added
            train/reduction:GradientSum.after_backward
            train/buffer_rules:BufferRules.after_micro
            train/reduction:BucketedSum.seal
train/reduction:GradientSum._arrived by register_post_accumulate_grad_hook
    tensors/dtensor_shards:local_of
    train/reduction:GradientSum._launch_full
        train/reduction:GradientSum._launch
            train/reduction:_Bucket.fill
            train/gloo_group:GlooGroup.allreduce
                train/generation_group:GenerationGroup.start
                    train/gloo_group:GlooGroup.start
train/step:Step.apply by Step
    train/replica:Replica.check_update
        train/state_guard:UsedState.check
        train/state_guard:StateGuard.before_update
        train/reduction:BucketedSum.check_sealed
    train/step:Step._scale
        train/replica:Replica.receive_weights
            train/control_channel:ControlChannel.receive
    train/replica:Replica.reduce
        train/reduction:GradientSum.flush
        train/reduction:GradientSum.finish
            train/generation_group:GenerationGroup.wait
                train/gloo_group:GlooGroup.wait
            train/reduction:scale_and_square
            train/reduction:BucketedSum._leave_alone
        train/replica:Replica._over_shards
            train/generation_group:GenerationGroup.intact
                train/gloo_group:GlooGroup.intact
    train/replica:Replica.reduce_buffers
        train/buffer_rules:BufferRules.reduce
    train/reduction:GradientSum.clip
        train/reduction:clip
    train/replica:Transaction.prepare
    train/replica:Replica.vote
        train/link:Link.yielding
        train/snapshots:StateSnapshots.due
        train/control_channel:ControlChannel.send
        train/control_channel:ControlChannel.receive
    train/replica:Transaction.commit
        train/replica:Replica.begin_update
            train/held_state:HeldState.before_update
                train/snapshots:StateSnapshots.before_update
                train/state_guard:StateGuard.release
        train/step:Step._update
            train/replica:Replica.updating
                train/held_state:HeldState.updating
                    train/state_guard:UsedState.before
                    train/buffer_rules:BufferRules.commit
                    train/state_guard:UsedState.after
        train/replica:Replica.end_update
            train/buffer_rules:BufferRules.keep
            train/step_report:StepTimer.commit
            train/held_state:StateSums.after
            train/step_report:ProgressReport.note
                train/step_report:ProgressReport.flush
                    train/link:Link.send
                        protocol/wire/frames:pack
            train/state_guard:StateGuard.note
""",
    forms="""
train/reduction:_Bucket train/reduction:Chunk train/reduction:GradientBuffer train/replica:Transaction
train/step_report:CommittedStep protocol/messages:ReportedStep protocol/messages:Progress
""",
    others=("a tensor of autograd's", "a word of the control channel", "a frame"),
)

EXIT_CODE = Walk(
    title="an exit code",
    hops="""
agent/process:WorkerProcess._ended
    agent/process:Leftovers.ended by reaped
    agent/process:WorkerProcess._leave
        protocol/machine/progress_record:ProgressRecord.read
        agent/process:WorkerProcess._was_killed_for_memory
            protocol/machine/processes:kills
        protocol/machine/processes:limit_bytes
        agent/process:WorkerProcess.tail
        agent/agent:Agent._on_exit by Exited
            agent/worker_logs:LogLimit.remove
            agent/snapshots:SnapshotKeeper.gone
            agent/snapshots:SnapshotKeeper.summing
            agent/health:HealthWatcher.gone
            agent/coordinator_link:CoordinatorLink.send
                agent/coordinator_link:Outbox.put
"""
    + TO_THE_CORE
    + """
coordinator/service/decision_loop:_ending by _ending
coordinator/membership/failures:exited by exited
    coordinator/membership/failures:cause_of
    coordinator/kernel/context:Context.record
    coordinator/machine:Core.request
        coordinator/machine:Core._serve
            coordinator/storage/durable_checkpoints:summing
    coordinator/membership/step_accounting:exited
    coordinator/membership/in_process:InProcessMode.on_exit
        coordinator/membership/failures:lose_worker
            coordinator/kernel/transitions:enter
                coordinator/kernel/index:PhaseIndex.move_worker
            coordinator/membership/in_process:InProcessMode.on_worker_lost
                coordinator/membership/processes:count_restart
                    coordinator/kernel/state:InARow.further
                coordinator/kernel/context:Context.open_incident
                    coordinator/kernel/incidents:open_incident
                        coordinator/kernel/incidents:_part_of
                        coordinator/kernel/incidents:_claim
                        coordinator/kernel/incidents:_explain_by_sighting
                    coordinator/kernel/incidents:describe
                        coordinator/kernel/incidents:stall_s
                coordinator/membership/failures:judge_exit
                    coordinator/membership/policy:failure_signature
                    coordinator/membership/failures:note_failure
                    coordinator/membership/queries:hoped_for
                    coordinator/membership/failures:_verdict
                        coordinator/membership/failures:_known
                        coordinator/kernel/incidents:script_fault
                coordinator/membership/generations:break_generation
                    coordinator/kernel/transitions:enter_job
                    coordinator/membership/wall_time:broke
                    coordinator/membership/replicas:broke
                        coordinator/kernel/context:Context.tell
coordinator/kernel/context:Context._attribute by _attribute
    protocol/ledger:about_one_incident
coordinator/service/watchers:Watchers.announce by announce
    coordinator/service/watchers:announcement
    coordinator/service/watchers:JobWatcher.tell
coordinator/service/watchers:JobWatcher.send by JobWatcher
    coordinator/service/watchers:JobWatcher._next
        coordinator/service/watchers:JobWatcher._say
engines/client:FolderReach.listen by event
engines/client:JobClient.watch by FolderReach
    protocol/wire/decoding:decode
engines/launcher:Launcher._watch by JobClient
    engines/launcher:Launcher.on_announcement
        engines/launcher:Launcher._show
            engines/shown:TolerantView.event
                cli/followers:Followers.event
                    observe/live:PlainView.event
                        observe/event_text:EventLines.line
                            observe/event_text:event_line
                                protocol/ledger:read
                                protocol/ledger:WorkerExited.sentence
                                protocol/units:clip_words
                                observe/printable:printable
                        observe/live:PlainView._print
""",
    forms="""
protocol/messages:Exited agent/coordinator_link:Letter coordinator/kernel/events:NodeSays
coordinator/service/queues:QueuedEvent coordinator/kernel/context:AwaitChecksums coordinator/kernel/state:RootCause
protocol/causes:ProcessEnded coordinator/kernel/state:Failure coordinator/kernel/state:Incident
protocol/ledger:WorkerExited protocol/ledger:IncidentOpened protocol/ledger:Broke protocol/messages:Break
coordinator/kernel/events:Record coordinator/kernel/events:Send coordinator/service/store:LedgerEntry
coordinator/service/store:LedgerBatch engines/client:Announcement
""",
    others=("a wait status", "a frame", "a row of SQLite's", "an announcement in JSON", "a line for people"),
)

SNAPSHOT = Walk(
    title="a snapshot",
    hops="""
train/replica:Replica.vote
    train/snapshots:StateSnapshots.due
    train/snapshots:StateSnapshots.want
train/replica:Replica.begin_step by begin_step
    train/held_state:HeldState.begin_step
        train/snapshots:StateSnapshots.expect
        train/held_state:HeldState.image
            train/buffer_rules:BufferRules.put_back
            train/state_image:capture
                tensors/tree:pack
                tensors/loaded:check_writable
                tensors/dtensor_shards:piece_of
                tensors/tree:lay_out
                train/state_image:Image
        train/snapshots:StateSnapshots.begin
            checkpoint/agent_link:AgentSlots.want
                train/link:Link.send
                    protocol/wire/frames:pack
agent/process:WorkerProcess._listen by WorkerMessage
    protocol/wire/frames:Codec.read_stream
        protocol/wire/decoding:decode by decode
    agent/agent:Agent._on_message by on_message
        agent/agent:Agent._handle
            agent/agent:Agent._give_slot
                agent/snapshots:SnapshotKeeper.slot_wanted
                    agent/snapshots:SnapshotKeeper._begin
                        checkpoint/memory:SlotPool.begin
                            checkpoint/memory:SlotPool._ready_slot
                            checkpoint/memory:SlotPool._bring_in
                agent/process:WorkerProcess.tell
                    protocol/wire/frames:pack
train/link:Link._take by ToWorker
    train/link:Link._note
train/snapshots:StateSnapshots._copy by _copy
    checkpoint/agent_link:AgentSlots.given
        train/link:Link.wait_slot
    checkpoint/agent_link:AgentSlots.fill
        checkpoint/memory:SlotMaps.blob
            checkpoint/memory:map_slot
    train/state_image:Image.parts
    tensors/staging:copy_into
agent/snapshots:SnapshotKeeper.slot_filled by SlotFilled
    tensors/index:decode_index
        tensors/index:checked
    checkpoint/memory:SlotPool.seal
        checkpoint/layout:sums_of
        checkpoint/layout:seal
            checkpoint/layout:encode_head
                checkpoint/layout:header_of
        checkpoint/memory:SlotPool.received
    agent/snapshots:_copy_of
        checkpoint/layout:parts_of
            checkpoint/layout:digest
agent/coordinator_link:CoordinatorLink.send by send
    agent/coordinator_link:Outbox.put
"""
    + TO_THE_CORE
    + """
coordinator/storage/memory_snapshots:held by held
    coordinator/storage/durable_checkpoints:summed
    coordinator/storage/memory_snapshots:_take
        coordinator/storage/memory_snapshots:_snapshot
            coordinator/storage/memory_snapshots:happened
            coordinator/storage/memory_snapshots:_makes_room
    coordinator/storage/memory_snapshots:spread
        coordinator/storage/memory_snapshots:_spread
            coordinator/storage/memory_snapshots:_expected
                coordinator/storage/queries:savers_of
            coordinator/storage/memory_snapshots:_buddies
                checkpoint/placement:place
                coordinator/storage/queries:nearest
                    protocol/place:nearness
            coordinator/storage/queries:holders
            coordinator/kernel/context:Context.send
            coordinator/storage/memory_snapshots:_mark_complete
                coordinator/storage/memory_snapshots:_tell_complete
                    coordinator/kernel/context:Context.record
                coordinator/storage/memory_snapshots:_retire
                    coordinator/storage/memory_snapshots:_complete_now
                coordinator/storage/durable_checkpoints:begin_due
                    checkpoint/policy:parse_cadence
                    coordinator/storage/durable_checkpoints:_auto_s
                        formulas:daly_interval_s
                    coordinator/storage/durable_checkpoints:_store
                        coordinator/storage/queries:sources
                        coordinator/storage/durable_checkpoints:_order
coordinator/storage/durable_checkpoints:progress by progress
coordinator/storage/durable_checkpoints:stored by stored
    coordinator/storage/durable_checkpoints:_order
coordinator/storage/durable_checkpoints:published by published
    coordinator/storage/durable_checkpoints:there
agent/coordinator_link:CoordinatorLink._receiving by ToAgent
    protocol/wire/frames:Codec.decode_all
    agent/coordinator_link:CoordinatorLink._carry_out
        agent/agent:Agent._on_order by take
            agent/snapshots:SnapshotKeeper.replicate
                checkpoint/replicate:replicate
                    checkpoint/replicate:Pull.head
                        checkpoint/snapshot_server:SnapshotPeer.head
                            checkpoint/snapshot_server:SnapshotPeer._answer
                                protocol/network/proof:Question
                            checkpoint/layout:decode_head
                    checkpoint/memory:SlotPool.begin
                    checkpoint/replicate:Pull.run
                        checkpoint/replicate:Blob.fetch_into by fetch_into
                            checkpoint/replicate:Blob._fill
                                checkpoint/snapshot_server:SnapshotPeer.read_into
                                checkpoint/layout:damaged
                    checkpoint/layout:seal
                    checkpoint/memory:SlotPool.received
            agent/snapshots:SnapshotKeeper.complete
                checkpoint/memory:SlotPool.snapshot_complete
            agent/snapshots:SnapshotKeeper.store
                checkpoint/memory:SlotPool.reading
                agent/snapshots:SnapshotKeeper._store_held
                    agent/snapshots:SnapshotKeeper._store
                        observe/transfer_progress:HowFar.add
                        checkpoint/archive:Archive.save_shard
                            checkpoint/layout:parts_of
                            checkpoint/tier:DiskTier.write
                            checkpoint/archive:Archive.save_head
            agent/snapshots:SnapshotKeeper.publish
                checkpoint/archive:Archive.commit
                    checkpoint/layout:encode_manifest
                    checkpoint/tier:DiskTier.publish
                    checkpoint/archive:Archive._still_there
                agent/snapshots:SnapshotKeeper._prune
                    checkpoint/archive:Archive.prune
                        checkpoint/policy:Retention.superfluous
protocol/network/range_server:RangeServer by RangeServer
    protocol/network/listener:HttpListener
protocol/network/range_server:RangeRequest.do_GET by HttpListener
    protocol/network/range_server:RangeServer._proof_for
        protocol/network/proof:admit
    checkpoint/snapshot_server:SnapshotServer.answer
        checkpoint/memory:SlotPool.reading
        checkpoint/snapshot_server:_send_blob
            checkpoint/snapshot_server:_send
""",
    forms="""
train/state_image:Image tensors/index:StateIndex tensors/index:TensorSpec tensors/dtensor_shards:Leaf
protocol/snapshots:Key protocol/messages:SnapshotExpected protocol/messages:SlotWanted checkpoint/memory:PooledSlot
protocol/messages:SlotGiven protocol/messages:SlotFilled checkpoint/layout:Head checkpoint/layout:Sealed protocol/snapshots:Part
protocol/snapshots:Shard protocol/snapshots:Copy protocol/messages:SnapshotStored agent/coordinator_link:Letter
coordinator/kernel/events:NodeSays coordinator/service/queues:QueuedEvent coordinator/kernel/state:HeldShard
coordinator/kernel/state:MemorySnapshot protocol/snapshots:Holder protocol/messages:Replicate
coordinator/kernel/events:Send checkpoint/replicate:Pull checkpoint/snapshot_server:SnapshotPeer checkpoint/replicate:Blob
protocol/messages:SnapshotComplete coordinator/kernel/state:Storing protocol/messages:StoreShard
protocol/messages:StoreProgress protocol/messages:Stored protocol/messages:Publish checkpoint/layout:Manifest
protocol/messages:Published protocol/job:Durable protocol/ledger:Snapshot protocol/ledger:Saved
coordinator/kernel/events:Record coordinator/service/store:LedgerEntry coordinator/service/store:LedgerBatch
""",
    others=(
        "tensors",
        "a slot's bytes",
        "a frame",
        "an answer over HTTP",
        "files of a tier",
        "a row of SQLite's",
    ),
)

OPTION = Walk(
    title="one option",
    hops="""
cli/torchrun:RunCommand.parse_args
    cli/job_file:expand
    cli/torchrun:take_out
    cli/torchrun:misplaced
cli/run:_command by RunCommand
    cli/options:command
        cli/options:_flat
            protocol/options:declared
            cli/options:_parameter
        cli/options:_with_defaults
        protocol/options:build
        protocol/options:check
            protocol/options:_check
    cli/run:_run
        cli/spec:plan
            engines/local:Local.plan
            cli/spec:check_text
        cli/run:_launched
            cli/run:_launch
                engines/local:Local.launch
                    engines/local/launcher:LocalLauncher
                    engines/launcher:Launcher.run
                        engines/local/launcher:LocalLauncher.open
                            engines/jobs:JobFolder.prepare
                        engines/launcher:Launcher._files
                        engines/coordinator_supervisor:CoordinatorSupervisor.keep
                            engines/coordinator_supervisor:Silence by timing
                                protocol/job_options:Timing.hang_s
coordinator/__main__:_run by spec.json
    protocol/wire/stored:decode_file
        protocol/wire/decoding:decode
    coordinator/__main__:_serve
        coordinator/service/liveness:beat
        coordinator/__main__:_take_up
            coordinator/service/server:Coordinator.__init__
                coordinator/machine:Core.__init__
                    coordinator/kernel/context:Context.__init__ by Context
                        coordinator/kernel/deadlines:Watch
                coordinator/service/decision_loop:DecisionLoop.__init__
                    protocol/job_options:Timing.heartbeat_s
                    coordinator/service/decision_loop:Starving
coordinator/kernel/deadlines:Watch._deadline_s by Watch
agent/__main__:main by spec.json
    protocol/wire/stored:read_stored
        protocol/wire/decoding:decode
    agent/__main__:_run
        agent/agent:Agent.__init__
            protocol/job_options:Timing.orphan_s
            agent/coordinator_link:CoordinatorLink.__init__
agent/agent:Agent._begin by Agent
    agent/process:WorkerProcess.__init__
agent/process:WorkerProcess.check_stopped by WorkerProcess
agent/coordinator_link:CoordinatorLink._beating by CoordinatorLink
cli/kubernetes:Kubernetes.run by run
    cli/kubernetes:run_on_kubernetes
        cli/kube_plan:plan_submission
            kubernetes/objects/schema:in_object
        cli/spec:check_text
        cli/kubernetes:_submit
            kubernetes/commands/submission:submit
                kubernetes/commands/submission:Submission.job
                kubernetes/commands/submission:_dry_run
                    kubernetes/objects/check:check
                kubernetes/client/api:Api.apply
kubernetes/client/informer:Informer.run by Api
    kubernetes/client/informer:Informer._take
        kubernetes/tasks/operator:Operator._on_job by on_change
            kubernetes/tasks/job_task:JobTask.put
kubernetes/tasks/job_task:JobTask._observe by JobTask
    kubernetes/objects/check:check
    kubernetes/objects/check:convert
        kubernetes/objects/schema:by_fields
    kubernetes/tasks/job_task:JobTask._ask
        kubernetes/tasks/coordinator_link:JobLink.follow
kubernetes/policy/losses:_vote_s by newest_of
kubernetes/tasks/job_task:JobTask._make_beside by _make_beside
    kubernetes/tasks/job_objects:JobObjects.make
        kubernetes/tasks/job_objects:_rendered
            kubernetes/objects/render:config_map
                kubernetes/objects/render:job_spec
        kubernetes/client/api:Api.create
kubernetes/pods/pod:read_pod by SPEC_FILE
    protocol/wire/stored:decode_file
kubernetes/pods/node:become_agent by read_pod
    kubernetes/pods/pod:PodPlace.prepare
        engines/folders:prepare_folder
""",
    forms="""
protocol/options:Option protocol/options:Declared protocol/job_options:Timing engines/run_options:FailureOptions
engines/run_options:RunOptions protocol/job:JobSpec engines/coordinator_supervisor:CoordinatorConfig
engines/coordinator_supervisor:Silence coordinator/kernel/state:CoreState coordinator/kernel/deadlines:Watch
agent/agent:AgentConfig kubernetes/commands/submission:Submission
kubernetes/objects/resource:HoldfastJobSpec kubernetes/objects/resource:HoldfastJob kubernetes/policy/plan:Observed
kubernetes/pods/pod:PodPlace
""",
    others=(
        "a word of the command line",
        "a line of a job file",
        "a parameter of Typer's",
        "spec.json",
        "a number in a dict, by its name in the object",
        "an object of Kubernetes",
        "a ConfigMap",
    ),
)

YAML = Walk(
    title="a job's YAML",
    hops="""
kubernetes/client/api:Api.watch
    kubernetes/client/api:_lines
kubernetes/client/informer:Informer.run by watch
    kubernetes/client/informer:Informer._take
        kubernetes/tasks/operator:Operator._on_job by on_change
            kubernetes/tasks/job_objects:has_queue
            kubernetes/tasks/job_task:JobTask.put
kubernetes/tasks/job_task:JobTask._once by JobTask
    kubernetes/tasks/job_objects:JobObjects.read
    kubernetes/tasks/job_task:JobTask._observe
        kubernetes/objects/check:check
            kubernetes/objects/schema:job_schema by job_schema
            kubernetes/objects/check:problems
            kubernetes/objects/check:_of_spec
                kubernetes/objects/check:_of_rules
                    kubernetes/objects/schema:rules_of
                kubernetes/objects/check:_cadences
                    checkpoint/policy:parse_cadence
                kubernetes/objects/check:_faults
                    protocol/faults:parse_fault
                kubernetes/objects/check:_of_template
            kubernetes/objects/check:_of_gang
            kubernetes/objects/check:_of_queue
        kubernetes/objects/check:convert
        kubernetes/objects/status:status_of
        kubernetes/objects/status:from_timestamp
        kubernetes/tasks/job_objects:JobObjects.accepted
        kubernetes/tasks/job_task:JobTask._ask
            kubernetes/policy/losses:newest_of
            kubernetes/tasks/coordinator_link:JobLink.follow
    kubernetes/policy/reconcile:reconcile
        kubernetes/policy/reconcile:current
        kubernetes/policy/losses:unseen_coordinator
        kubernetes/policy/losses:missing_from_sight
        kubernetes/policy/reconcile:_plan
            kubernetes/policy/reconcile:_end
            kubernetes/policy/reconcile:_why_held
                kubernetes/policy/queues:why_held
            kubernetes/policy/reconcile:_running
                kubernetes/policy/reconcile:beside
                kubernetes/policy/reconcile:_group
                kubernetes/policy/reconcile:_coordinator
                    kubernetes/names:coordinator_name
                    kubernetes/policy/losses:why_lost
                kubernetes/policy/reconcile:_nodes
                    kubernetes/policy/reconcile:_here
                        kubernetes/policy/losses:crashing_nodes
                    kubernetes/policy/reconcile:lost_nodes
                        kubernetes/policy/losses:returning_nodes
                    kubernetes/policy/machines:marks_kept_up
                    kubernetes/policy/queues:granted
                    kubernetes/policy/reconcile:wanted_nodes
                    kubernetes/policy/reconcile:_make
                        kubernetes/names:number_of
                kubernetes/policy/reconcile:_numbers_together
                kubernetes/policy/conditions:status_of
                    kubernetes/policy/conditions:size_to_ask
                kubernetes/policy/queues:waiting_status
    kubernetes/tasks/job_task:JobTask._act
        kubernetes/tasks/expectations:Expectations.is_news
        kubernetes/tasks/job_task:JobTask._do_at_once
            kubernetes/tasks/job_task:JobTask._do
                kubernetes/tasks/job_task:JobTask._number
                    kubernetes/policy/conditions:begun
                    kubernetes/tasks/job_task:JobTask._write
                        kubernetes/tasks/job_task:JobTask._apply
                            kubernetes/objects/status:status_patch
                            kubernetes/client/api:Api.test_and_set
                        kubernetes/policy/conditions:news
                        kubernetes/tasks/job_events:JobEvents.tell
                    kubernetes/tasks/expectations:Expectations.numbered
                kubernetes/tasks/job_task:JobTask._make_beside
                    kubernetes/tasks/job_objects:JobObjects.make
                        kubernetes/tasks/job_objects:_rendered
                            kubernetes/objects/render:config_map
                                kubernetes/objects/render:job_spec
                                    kubernetes/objects/resource:workers_of_node
                                    kubernetes/objects/resource:snapshot_bytes
                        kubernetes/client/api:Api.create
                kubernetes/objects/render:agent_pod
                    kubernetes/names:node_name
                    kubernetes/objects/render:_agent_volumes
                    kubernetes/objects/render:_agent_environment
                    kubernetes/objects/resource:quantity_of_limit
                        kubernetes/objects/resource:quantity
                    kubernetes/objects/render:ties_to_group
                    kubernetes/objects/render:spec_hash
                kubernetes/tasks/job_objects:JobPods.make
                    kubernetes/client/api:Api.create
                    kubernetes/tasks/job_objects:JobPods._saw
                        kubernetes/objects/pod:pod_seen
                        kubernetes/tasks/expectations:Expectations.saw
kubernetes/pods/node:main by holdfast.kubernetes.pods.node
    kubernetes/pods/pod:read_pod
        protocol/wire/stored:decode_file
            protocol/wire/decoding:decode
        engines/jobs:job_dir
    kubernetes/pods/node:become_agent
        engines/folders:find_environment_problems
        kubernetes/pods/pod:PodPlace.prepare
            engines/folders:prepare_folder
        kubernetes/pods/pod:read_place
        engines/agents:agent_arguments
        protocol/machine/processes:python_module
agent/__main__:main by holdfast.agent
    protocol/wire/stored:read_stored
    agent/__main__:_run
        agent/agent:Agent.__init__
""",
    forms="""
kubernetes/objects/check:Problem kubernetes/objects/resource:HoldfastJobSpec kubernetes/objects/resource:RunSpec
kubernetes/objects/resource:HoldfastJob kubernetes/policy/plan:Observed kubernetes/policy/plan:Plan
kubernetes/policy/plan:Number kubernetes/objects/status:JobStatus kubernetes/policy/plan:MakeObject
kubernetes/policy/plan:MakeNode kubernetes/objects/pod:PodSeen protocol/job:JobSpec kubernetes/pods/pod:PodPlace
agent/agent:AgentConfig
""",
    others=("an object of Kubernetes", "a ConfigMap", "a pod", "spec.json", "arguments of a process"),
)

WALKS = (GRADIENT, EXIT_CODE, SNAPSHOT, OPTION, YAML)


@dataclass(frozen=True)
class Hop:
    """One function of a walk. caller: the line that it is indented below; None: it is not indented."""

    place: str
    by: str
    caller: str | None


def hops_of(walk: Walk) -> Iterator[Hop]:
    above: list[tuple[int, str]] = []
    for line in filter(None, walk.hops.splitlines()):
        depth = len(line) - len(line.lstrip())
        place, _, by = line.strip().partition(" by ")
        while above and above[-1][0] >= depth:
            above.pop()
        yield Hop(place, by, above[-1][1] if above else None)
        above.append((depth, place))


def files(walk: Walk) -> set[str]:
    return {one.partition(":")[0] for one in (*(hop.place for hop in hops_of(walk)), *walk.forms.split())}


def forms(walk: Walk) -> set[str]:
    return {*walk.forms.split(), *walk.others}


def faults(walk: Walk, modules: Mapping[str, Module]) -> Iterator[str]:
    """What of a walk is not as in the sources. modules: by their names below the package, as `train/step`."""
    found: dict[str, ast.AST] = {}
    above: set[str] = set()
    for hop in hops_of(walk):
        node = _definition(hop.place, modules)
        if node is None:
            yield f"{hop.place} is gone"
            continue
        module, _, dotted = hop.place.partition(":")
        name = dotted.removesuffix(".__init__").rpartition(".")[2]
        if hop.by:
            leading = {hop.caller.partition(":")[0]} if hop.caller is not None else above
            if not any(one in modules and hop.by in _names(modules[one].tree) for one in leading):
                yield f"{hop.place}: {hop.by} stands in no module of what it follows from"
            if hop.by not in _names(modules[module].tree):
                yield f"{hop.place}: {hop.by} does not stand in its own module"
        elif hop.caller is not None:
            if hop.caller in found and name not in _names(found[hop.caller]):
                yield f"{hop.place} is not called by {hop.caller}"
        elif above:
            yield f"{hop.place} follows from nothing: `by` is missing"
        found[hop.place] = node
        above.add(module)
    for form in walk.forms.split():
        if not isinstance(_definition(form, modules), ast.ClassDef):
            yield f"{form} is no class"


def _definition(place: str, modules: Mapping[str, Module]) -> ast.AST | None:
    """The function or class of a place; None: there is none."""
    module, _, dotted = place.partition(":")
    if module not in modules:
        return None
    node: ast.AST = modules[module].tree
    for name in dotted.split("."):
        body = getattr(node, "body", [])
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        known = [one for one in body if isinstance(one, kinds) and one.name == name]
        if not known:
            return None
        node = known[0]
    return node


@functools.cache
def _names(tree: ast.AST) -> set[str]:
    """All identifiers that stand below a node, and all strings of a word or a path."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.add(text)
            case _:
                pass
    return found


def by_path(modules: list[Module]) -> dict[str, Module]:
    """A package's modules by their names below it."""
    return {one.name.partition(".")[2].replace(".", "/"): one for one in modules}
