"""The entry point of `swiftlite`: find the command, parse and check its options, and start processes or run the
command.

The commands are in `table.py`. A UserError is printed and sets the exit code; other exceptions keep their traceback.
"""

import hashlib
import os
import select
import signal
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import swiftlite
from swiftlite import rules
from swiftlite.args.commands import DoctorArgs, SftArgs
from swiftlite.args.data_file import split_sample
from swiftlite.base import log
from swiftlite.base.errors import OptionError, UserError, is_of_memory, is_of_storage, reason_of
from swiftlite.base.heads import Heads
from swiftlite.base.redact import redact_text, remember
from swiftlite.bridge.encoding.quantization import describe_quantization
from swiftlite.cli.fetch import claim_checkpoint_store, fetch, fetch_checkpoint, hold_commits
from swiftlite.cli.help import command_help, overview
from swiftlite.cli.memory_tables import memory_section
from swiftlite.cli.parse import parse
from swiftlite.cli.planned import planned_command, separate
from swiftlite.cli.table import Command, commands, find
from swiftlite.launch import failure, start
from swiftlite.plan.cost.gpus import gpu_named
from swiftlite.plan.facts import read_facts, read_hf_config
from swiftlite.plan.kernels import this_machine
from swiftlite.plan.run import make_schedule, plan_of
from swiftlite.plan.text import render
from swiftlite.runtime.environment import SAFE_PATH, gpu_models, sees_gpu
from swiftlite.runtime.parent import exit_with_parent
from swiftlite.runtime.progress import num_restarts


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    _handle_signals()
    try:
        code = _run(argv)
        print(end="", flush=True)  # at exit, Python would report a closed pipe as an error
        return code
    except UserError as error:
        failure.report(error, error.exit_code, is_final=error.is_final)
        _log_once(f"swiftlite: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _log_once("swiftlite: interrupted")
        return 130
    except _Stopped as stopped:
        _log_once(f"swiftlite: stopped by {stopped}")
        return stopped.code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 128 + signal.SIGPIPE
        if is_of_storage(error):
            return _fail(error, "free disk space or fix the disk, then run the same command again")
        if isinstance(error, PermissionError):
            return _fail(error, "allow this user to read the file, or to write to the directory")
        if is_of_memory(error):
            return _fail(error, _LESS_MEMORY)
        if failure.report(error, 1):
            return 1
        raise


_LESS_MEMORY = (
    "use a smaller --micro_batch_size, --max_batch_size or --max_length, or for training --recompute_granularity full "
    "or more processes; swiftlite doctor --plan estimates the memory"
)


def _fail(error: Exception, hint: str) -> int:
    """Print an error of the machine (disk, memory) with its reason and a hint, without a traceback; return the exit
    code.
    """
    failure.report(error, 1, is_final=True)
    _log_once(f"swiftlite: {reason_of(error)}\n    {hint}")
    return 1


class _Stopped(SystemExit):
    """The process received SIGTERM or SIGHUP, and no more specific handler was set.

    This exception is also raised in forked child processes.
    """

    code: int

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


def _handle_signals() -> None:
    """Make a rank end when its launcher ends. In other processes, raise an exception on SIGTERM and SIGHUP.

    After the exception, a process releases its resources and prints a message. In a rank, outside of the training
    steps, these signals keep their default action, which ends the rank immediately. An exception is not used there,
    because Python's handlers do not run while a rank waits in a collective.
    """
    if launcher := os.environ.get(failure.LAUNCHER):
        exit_with_parent(int(launcher))
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        return _show(overview())
    if argv[0] in ("-V", "--version"):
        return _show(f"swiftlite {swiftlite.__version__}")
    prefix = argv[0] + " "
    if any(command.words.startswith(prefix) for command in commands()) and argv[1:2] in ([], ["-h"], ["--help"]):
        return _show(overview(prefix))

    command, rest = find(argv)
    if "-h" in rest or "--help" in rest:
        return _show(command_help(command))

    if command.first_option and rest and not rest[0].startswith("-"):
        rest = [f"--{command.first_option}", *rest]
    args, notes = _parse(command, rest)
    remember(asdict(args))
    processes = start.read_environment(os.environ)
    world_size = 1
    if command.is_parallel:
        world_size = processes.world_size
    rank = processes.rank or 0
    log.setup(rank)
    max_restarts = 0
    if isinstance(args, SftArgs):
        max_restarts = args.max_restarts
        if num_restarts():  # after a failure
            args = replace(args, resume=True)
    start.check_restarts(processes, max_restarts, is_parallel=command.is_parallel)
    _settle_environment(args)
    is_first_node = rank == 0 and processes.node_rank == 0
    # The launcher has just used the store; after a restart, only the first rank uses it.
    uses_store = is_first_node and (processes.rank is None or failure.LAUNCHER not in os.environ or num_restarts() > 0)
    if uses_store:
        uses_store = fetch_checkpoint(args)
    hold_commits(args)
    # Only rank 0 checks, because other ranks could find files that rank 0 has already written.
    # A spare node can start when the run has already started.
    if rank == 0 and not (max_restarts and processes.node_rank):
        notes += rules.check(args, world_size)
    if isinstance(args, SftArgs) and args.dry_run:
        if rank > 0:
            return 0
        _log(notes, command, processes)
        return _show(_dry_run(args, world_size, processes))
    if uses_store:
        claim_checkpoint_store(args)
    if rank == 0:
        fetch(args)
    if command.is_parallel and processes.must_start(max_restarts):
        if isinstance(args, SftArgs) and max_restarts:
            node_counts = [processes.nnodes]
            if is_first_node:
                node_counts = _node_counts(args, processes)
            restarts = start.Restarts(max_restarts, Path(args.output_dir), node_counts)
            start.start(processes, argv, restarts)
        start.start(processes, argv)
    if rank == 0:
        _log(notes, command, processes)
    if not sys.warnoptions:
        _ignore_upstream_warnings()
    return command.load()(args) or 0


def _parse(command: Command, argv: list[str]) -> tuple[Any, list[str]]:
    """Return the arguments of a command, for `doctor --plan` a `PlannedRun`, and notes (`parse`)."""
    if command.args_class is DoctorArgs:
        command = planned_command(command, argv)
    args, notes = parse(command.args_class, argv, command.words, command.choices())
    return separate(args), notes


def _node_counts(args: SftArgs, processes: start.Processes) -> list[int]:
    """Return the numbers of nodes, between the limits of NNODES, that the layout and the batch sizes allow.

    Raises:
        OptionError: the smallest number is not allowed. The largest one has been checked before.
    """
    counts = []
    for nodes in range(processes.min_nodes, processes.nnodes):
        try:
            rules.check(args, nodes * processes.nproc_per_node)
        except OptionError as error:
            if nodes > processes.min_nodes:
                continue
            problems = [
                (f"NNODES={processes.nnodes_text} allows {nodes}: {text}", hint) for text, hint in error.problems
            ]
            raise OptionError(problems) from None
        counts.append(nodes)
    return [*counts, processes.nnodes]


def _settle_environment(args: object) -> None:
    """Set environment variables for torch and all subprocesses. Variables that the user has set are not changed."""
    for name, value in SAFE_PATH.items():
        os.environ.setdefault(name, value)
    # Waiting threads spin for less than 1 ms, then sleep. Without spinning, training a small model takes 10 % longer.
    # With long spinning, it takes 8 times as long if another program runs.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # for GNU OpenMP, which torch includes
    if isinstance(args, SftArgs):
        # torch's flight recorder, see `runtime/flight_recorder.py`
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        traces = Path(args.output_dir).absolute() / "flight_recorder_rank_"
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(traces))
        # Rows of varying lengths fragment the allocator's memory. Buffers of NCCL do not support these segments.
        if "PYTORCH_ALLOC_CONF" not in os.environ and not (args.megatron_config or {}).get("nccl_ub"):
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        # GPUs before Blackwell start the kernels of a single queue in order, so that a matrix product does not start
        # before the communication that overlaps with it.
        if args.tensor_model_parallel_size > 1 and not any("B200" in model for model in gpu_models()):
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if args.deterministic_mode:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch
            os.environ.setdefault("NCCL_ALGO", "^NVLS")  # NVLS sums in order of arrival
            os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
    if hasattr(args, "infer_backend"):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides logs of vLLM's workers about NUMA nodes


def _ignore_upstream_warnings() -> None:
    # megatron-core warns many times per rank that Transformer Engine and Apex are missing; doctor prints it once.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    # Caused by megatron-core's checkpoint loader, but the CPU shim hides the name of its module.
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    # Caused by megatron-core's pipeline, which accesses gradients of sent tensors.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # Caused by megatron-core, which calls collectives by their old names.
    warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning)


def _log(notes: list[str], command: Command, processes: start.Processes) -> None:
    if processes.must_start() and not command.is_parallel:
        notes = [*notes, f"NPROC_PER_NODE and NNODES have no effect: swiftlite {command.words} runs in one process"]
    num_gpus = len(gpu_models())
    if command.is_parallel and processes.rank is None and processes.world_size == 1 and num_gpus > 1:
        notes = [*notes, f"using 1 of {num_gpus} GPUs: export NPROC_PER_NODE={num_gpus} to use all"]
    for note in notes:
        log.logger.warning(note)


def _dry_run(args: SftArgs, world_size: int, processes: start.Processes) -> str:
    gpus = [gpu for gpu in map(gpu_named, gpu_models()) if gpu]
    capability = gpus[0].capability if gpus else 0.0
    facts = read_facts(args, world_size, this_machine(sees_gpu(), capability))
    plan = plan_of(args, facts)
    schedule = None
    if not args.packing and (num_rows := _count_rows(args.dataset)):
        schedule = make_schedule(args, num_rows)
    restarts = ""
    if args.max_restarts:
        restarts = f"at most {args.max_restarts}, each after a failure"
        if processes.min_nodes < processes.nnodes:
            restarts += f"; on {', '.join(map(str, _node_counts(args, processes)))} nodes"
    stored = Heads.from_config(read_hf_config(facts.directory))  # `facts` has the drafter of --drafter instead
    text = render(args, plan, stored, schedule, describe_quantization(facts.hf_config), restarts)
    return text + memory_section(args, plan, facts)


def _count_rows(dataset: list[str]) -> int | None:
    """Return the number of rows of JSON Lines files; None if a file has another format."""
    total = 0
    for name in dataset:
        file, sample = split_sample(name)
        if not file.endswith(".jsonl"):
            return None
        with Path(file).open("rb") as lines:
            rows = sum(1 for line in lines if line.strip())
        if sample:
            rows = min(int(sample), rows)
        total += rows
    return total


def _show(text: str) -> int:
    print(text)
    return 0


def _reader_is_gone() -> bool:
    """Return whether the reader of stdout, such as `| head`, has closed the pipe. The rest of the output is discarded.

    A connection to a server can be the broken pipe as well.
    """
    stdout = 1  # sys.stdout is None if the process was started without stdout
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    is_gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # Python flushes again at exit
    return is_gone


def _log_once(text: str) -> None:
    """Print to stderr once for all ranks of this machine."""
    folder = os.environ.get(failure.FOLDER)
    if folder:
        try:
            (Path(folder) / hashlib.sha256(text.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return
        except FileNotFoundError:
            pass
    log.write_line(redact_text(text))
