"""The command ``outrider``: its verbs, its exit statuses, and nothing else.

Each verb checks what it was given before it loads anything, opens the model, and hands over to a
module of :mod:`outrider.commands`. Exit status 0 is success, 1 a failure, 2 a usage error, 130
Ctrl-C; only bench ends with its verdict: 0 go, 1 no-go, 2 inconclusive, 3 whatever kept it from
one. torch is imported only by verbs that run a model.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

import outrider
from outrider.commands import console
from outrider.commands.answer_report import completion_json, stats_table
from outrider.commands.bench_options import (
    ArmOptions,
    LoadOptions,
    MeasuringOptions,
    WorkloadOptions,
)
from outrider.commands.options import (
    DEFAULT_MODEL,
    EngineOptions,
    SamplingOptions,
    SpeculationOptions,
    whole_number,
)
from outrider.commands.serve_options import ServeOptions
from outrider.commands.train_options import (
    DataOptions,
    EvaluationOptions,
    LoopOptions,
    RecipeOptions,
    train_settings,
)
from outrider.errors import OutriderError, ParameterError, PromptError, UsageError

if TYPE_CHECKING:
    from outrider.llm import LLM

SCHEMA_VERSION = 1
EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_INVALID = 3  # of bench, whose 1 and 2 are verdicts

# Many small blocks tell more than few large ones in the same time.
DEMO_MEASURING, DEMO_ROUNDS = MeasuringOptions(blocks=12, aa_blocks=2), 2

Flag = Annotated[bool, Parameter(negative="")]
Whole = Annotated[int, Parameter(converter=whole_number)]


app = App(
    name="outrider",
    version=outrider.__version__,
    help="Lossless speculative decoding that you can trust, measure and decide on.",
    help_epilogue="`--debug` anywhere, or OUTRIDER_DEBUG=1, shows the traceback of a failure.",
    suppress_keyboard_interrupt=False,
)
app["--help"].group = app["--version"].group = Group("Help", sort_key=9)
models = App(name="models", help="List and fetch models.")
app.command(models)


def open_llm(engine: EngineOptions, speculation: SpeculationOptions, **more: Any) -> LLM:
    """Load a model, showing progress; ``more`` sets further fields of the engine's settings."""
    settings, drafting = engine.config(**more), speculation.config()
    chosen = {} if drafting is None else {"speculation": drafting}
    with console.Stages() as stages:
        from outrider.llm import LLM

        llm = LLM(engine.model, engine=settings, on_progress=stages, **chosen)
    for warning in llm.warnings:
        console.note(f"warning: {warning}")
    return llm


@models.command(name="list")
def models_list(*, json: Flag = False) -> int:
    """List the models known by name and those in the cache.

    Parameters
    ----------
    json
        Print one JSON document.
    """
    from outrider.models.loading import hub

    entries = hub.list_models()
    if json:
        listed = [
            {
                "name": entry.name,
                "source": entry.source,
                "licence": entry.licence,
                "size_bytes": entry.size_bytes,
                "path": None if entry.path is None else str(entry.path),
            }
            for entry in entries
        ]
        console.print_json({"schema_version": SCHEMA_VERSION, "models": listed})
        return EXIT_OK
    rows = [
        (
            entry.name,
            entry.licence,
            console.format_bytes(entry.size_bytes),
            "in the cache" if entry.path else "not fetched",
            entry.source,
        )
        for entry in entries
    ]
    columns = ("name", "licence", "size", "state", "from")
    console.stdout().print(console.table(columns, rows, numbers_from=len(columns)))
    return EXIT_OK


@models.command(name="pull")
def models_pull(name: str, /) -> int:
    """Fetch a model into the user cache and check its hash.

    Parameters
    ----------
    name
        A name from `outrider models list`, or a Hugging Face id.
    """
    from outrider.models.loading import hub

    with console.Stages() as stages:
        path = hub.pull(name, stages)
    sys.stdout.write(f"{path}\n")
    return EXIT_OK


@app.command
def generate(
    prompt: str | None = None,
    /,
    *,
    file: Path | None = None,
    raw: Flag = False,
    system: str | None = None,
    json: Flag = False,
    stats: Flag = False,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen, as all three groups
    speculation: SpeculationOptions = SpeculationOptions(),  # noqa: B008
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
) -> int:
    """Write the answer to one prompt to stdout, as it comes.

    Parameters
    ----------
    prompt
        The prompt. Without it: --file, else stdin.
    file
        Read the prompt from this file.
    raw
        Continue the text as it is, without the model's chat template.
    system
        Standing instruction, in front of the prompt.
    json
        Print one JSON document instead, when the answer is complete.
    stats
        Print a table of counts and times to stderr afterwards.
    """
    if raw and system is not None:
        raise ParameterError("--system: needs the chat template; leave out --raw or --system")
    params = sampling.params()
    speculation.config()
    text = read_prompt(prompt, file)
    llm = open_llm(engine, speculation)
    ids = prompt_ids(llm, text, raw=raw, system=system)
    write = (lambda _: None) if json else console.write_text
    written, completion = console.relay(llm.stream(ids, params), write)
    if not json:
        console.write_text("" if written.endswith("\n") else "\n")
    if completion is None:
        return EXIT_INTERRUPTED
    if json:
        console.print_json(completion_json(completion, engine.model, llm.fingerprint.to_json()))
    if stats:
        console.stderr().print(stats_table(completion))
    if completion.error is not None:
        console.error(completion.error)
        return EXIT_FAILURE
    return EXIT_OK


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the command line, the file or stdin.

    Raises:
        UsageError: there is none, there are two, or it is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise UsageError("PROMPT and --file: both were given; leave one out")
    if prompt is not None:
        console.decode_text(os.fsencode(prompt), "PROMPT")
        text = prompt
    elif file is not None:
        try:
            with file.open("rb") as opened:
                text = console.decode_text(console.read_limited(opened, str(file)), str(file))
        except OSError as problem:
            raise UsageError(f"--file: {file} cannot be read: {problem.strerror}") from None
    elif sys.stdin.isatty():
        raise UsageError("no prompt: give PROMPT, --file FILE, or text on stdin")
    else:
        text = console.decode_text(console.read_limited(sys.stdin.buffer, "stdin"), "stdin")
    if not text.strip():
        raise PromptError("the prompt is empty; give at least one character that is not a space")
    return text


def prompt_ids(llm: LLM, text: str, *, raw: bool, system: str | None) -> list[int]:
    """Token ids of the prompt, as a chat message where the model has a chat template."""
    if raw or not llm.tokenizer.has_chat_template:
        if system is not None:
            raise ParameterError("--system: this model has no chat template; leave it out")
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


@app.command
def chat(
    *,
    system: str | None = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculationOptions = SpeculationOptions(),  # noqa: B008
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008
) -> int:
    """Talk with the model; it remembers the conversation.

    Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help lists the commands. Without a terminal,
    each line of stdin is a message.

    Parameters
    ----------
    system
        Standing instruction.
    """
    from outrider.commands.chat import HELP, Conversation, Session, line_reader, run

    params = sampling.params()
    llm = open_llm(engine, speculation)
    if not llm.tokenizer.has_chat_template:
        raise UsageError(
            f"{engine.model} has no chat template; use: outrider generate --raw --model ..."
        )
    console.note(HELP)
    return run(Session(llm, params, Conversation(system)), line_reader())


@app.command
def inspect(
    model: str = DEFAULT_MODEL,
    /,
    *,
    head: str | None = None,
    max_batch_size: Whole = 1,
    max_model_len: Whole | None = None,
    dtype: str = "auto",
    threads: Whole | None = None,
    json: Flag = False,
) -> int:
    """Show a model's architecture, tokeniser, memory plan and exactness on this machine.

    With --head also the drafter: what it is, how it was understood, and whether it fits the model.

    Parameters
    ----------
    model
        Name, folder or file.
    head
        Draft head, or draft model, to check beside the model.
    max_batch_size
        Requests decoded together, for the memory plan.
    max_model_len
        Most tokens of prompt and answer together, for the memory plan.
    dtype
        auto|bfloat16|float32.
    threads
        Compute threads.
    json
        Print one JSON document.
    """
    settings = EngineOptions(
        model=model, dtype=dtype, threads=threads, max_model_len=max_model_len
    ).config(max_batch_size=max_batch_size)
    from outrider.commands import inspection

    with console.Stages() as stages:
        found = inspection.inspect(model, settings, head=head, on_progress=stages)
    if json:
        console.print_json({"schema_version": SCHEMA_VERSION, **found.to_json()})
    else:
        for part in found.tables():
            console.stdout().print(part)
    return EXIT_OK


@app.command
def convert(
    head: Path,
    /,
    *,
    model: str,
    layout: Literal["safeailab", "speculators"],
    out: Path,
    json: Flag = False,
) -> int:
    """Write an EAGLE-3 head in another layout, for another engine; its weights stay as they are.

    Parameters
    ----------
    head
        Folder or file of the head.
    model
        The model it drafts for: name, folder or file.
    layout
        The layout to write.
    out
        Folder to write; must not exist, or be empty.
    json
        Print one JSON document.
    """
    from outrider.commands import convert as conversion

    with console.Stages() as stages:
        done = conversion.convert(head, model, layout, out, on_progress=stages)
    if json:
        console.print_json({"schema_version": SCHEMA_VERSION, **done.to_json()})
    else:
        console.stdout().print(done.table())
    return EXIT_OK


@app.command
def train(
    method: str,
    /,
    *,
    model: str = DEFAULT_MODEL,
    out: Path,
    only_answers: Flag = False,
    json: Flag = False,
    data: DataOptions = DataOptions(),  # noqa: B008 - frozen, as all groups
    recipe: RecipeOptions = RecipeOptions(),  # noqa: B008
    loop: LoopOptions = LoopOptions(),  # noqa: B008
    evaluation: EvaluationOptions = EvaluationOptions(),  # noqa: B008
    typed: Annotated[Sequence[str], Parameter(parse=False)] = (),
) -> int:
    """Train a draft head for a model: prompts, answers, features, training, evaluation, export.

    Each stage goes on where it was interrupted: run the same command again.

    Parameters
    ----------
    method
        eagle3, mtp, medusa or draft.
    model
        The model to draft for: name, Hugging Face id, folder or file.
    out
        Folder of the run; the head will be in OUT/head.
    only_answers
        Stop when the target has answered the prompts of this --part.
    json
        Print one JSON document at the end.
    """
    settings = train_settings(
        method, model, out, data=data, recipe=recipe, loop=loop, evaluation=evaluation, typed=typed
    )
    from outrider.commands import train as training

    result = training.train(settings, only_answers=only_answers)
    if result is None:
        return EXIT_OK
    if json:
        console.print_json(training.result_json(result))
    else:
        for part in training.result_table(result):
            console.stdout().print(part)
    return EXIT_FAILURE if result.report.is_lossless is False else EXIT_OK


@app.command
def demo(
    *,
    methods: Annotated[
        str | None,
        Parameter(
            help="Comma-separated, such as ngram,draft,medusa-tree,eagle3-tree+ngram. Without it: "
            "n-gram, and every head that there is for the model."
        ),
    ] = None,
    head: Annotated[list[str] | None, Parameter(negative="")] = None,
    concurrency: str = "1,4",
    max_tokens: Whole | None = None,
    out: Path | None = None,
    json: Flag = False,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    typed: Annotated[Sequence[str], Parameter(parse=False)] = (),
) -> int:
    """Measure every way to draft against plain decoding: a short bench on the bundled prompts.

    Ends with 0 whatever the verdict, and with 1 where nothing can be said.

    Parameters
    ----------
    head
        METHOD=DIR, a head that does not ship for the model; may be repeated.
    concurrency
        Users at once, comma-separated.
    max_tokens
        Most tokens per answer. Without it: the fewer the more methods there are.
    out
        Folder of the run: records, summary.json, report.html. Without it: a new one, by the time.
    json
        Print the summary as one JSON document instead of the tables.
    """
    benching = _benching("demo")
    loads = LoadOptions(concurrency=concurrency).loads()
    asked = benching.read_prompts(WorkloadOptions())

    def answer_len(num_arms: int) -> int:
        return max_tokens or benching.demo_tokens(num_arms)

    arms = ArmOptions(methods=methods, head=head or [])
    specs = arms.specs(engine, loads, asked.questions, answer_len)
    sampling = WorkloadOptions(max_tokens=answer_len(len(specs))).sampling()
    settings = DEMO_MEASURING.settings(specs, loads, sampling, rounds=DEMO_ROUNDS)
    status = benching.run(settings, asked, out or benching.new_folder("demo"), typed, json=json)
    return {EXIT_INVALID: EXIT_FAILURE, EXIT_INTERRUPTED: EXIT_INTERRUPTED}.get(status, EXIT_OK)


def _benching(verb: str) -> ModuleType:
    """The module that measures, whose packages are an extra.

    Raises:
        UsageError: they are not installed.
    """
    try:
        from outrider.commands import bench as benching
    except ModuleNotFoundError as problem:
        raise UsageError(
            f"{verb} needs the package {problem.name!r}: pip install 'outrider[bench]'"
        ) from None
    return benching


@app.command
def serve(
    *,
    serving: ServeOptions = ServeOptions(),  # noqa: B008 - frozen, as all groups
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculationOptions = SpeculationOptions(),  # noqa: B008
) -> int:
    """Serve a model to OpenAI's clients over HTTP, many requests at once."""
    from outrider.commands import serve as serving_command

    serving.check()
    fields = serving.engine_fields()
    engine.config(**fields)
    speculation.config()
    return serving_command.run(serving, lambda: open_llm(engine, speculation, **fields))


@app.command
def bench(
    *,
    from_: Annotated[
        Path | None,
        Parameter(name="--from", help="Measure nothing: judge the run in this folder anew."),
    ] = None,
    out: Path | None = None,
    json: Flag = False,
    csv: Flag = False,
    arms: ArmOptions = ArmOptions(),  # noqa: B008
    load: LoadOptions = LoadOptions(),  # noqa: B008
    workload: WorkloadOptions = WorkloadOptions(),  # noqa: B008
    measuring: MeasuringOptions = MeasuringOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    typed: Annotated[Sequence[str], Parameter(parse=False)] = (),
) -> int:
    """Measure speculation against its own baseline on your prompts and load, and judge it.

    Ends with the verdict as exit status: 0 go, 1 no-go, 2 inconclusive, 3 nothing can be said.
    Interrupted, it goes on where it was: run the same command again.

    Parameters
    ----------
    out
        Folder of the run: records, summary.json, report.html. Without it: a new one, by the time.
    json
        Print the summary as one JSON document instead of the tables.
    csv
        Also write requests.csv, a row per request, into the folder.
    """
    is_plain = (arms, load, workload, measuring, engine) == (
        ArmOptions(),
        LoadOptions(),
        WorkloadOptions(),
        MeasuringOptions(),
        EngineOptions(),
    )
    if from_ is not None and not (is_plain and out is None):
        raise UsageError(
            "--from: judges what was measured, under the settings of that run; of the other flags "
            "only --json and --csv go with it"
        )
    benching = _benching("bench")
    if from_ is not None:
        return benching.judge_again(from_, json=json, csv=csv)
    loads = load.loads()
    settings = measuring.settings(
        (),
        loads,
        workload.sampling(),
        served_model=arms.served_model,
        one_at_a_time=arms.one_at_a_time,
        arrival_seed=workload.seed,
    )
    asked = benching.read_prompts(workload)
    # Last: which methods there are depends on the model, which may have to be fetched.
    specs = arms.specs(
        engine,
        loads,
        asked.questions,
        lambda _: workload.max_tokens,
        is_chat=settings.sampling.is_chat,
    )
    settings = replace(settings, arms=specs)
    folder = out or benching.new_folder("bench")
    return benching.run(settings, asked, folder, typed, json=json, csv=csv)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; no traceback reaches the user unasked."""
    given, is_debug = _take_debug(sys.argv[1:] if arguments is None else arguments)
    console.make_robust()
    try:
        verb, bound, unparsed = app.parse_args(given, exit_on_error=False, print_error=False)
        # The only thing that a verb takes without parsing it is the command line as a whole.
        status = verb(*bound.args, **bound.kwargs, **dict.fromkeys(unparsed, given))
        sys.stdout.flush()
    except CycloptsError as problem:
        console.error(_usage_message(problem))
        return _failed(EXIT_USAGE, given)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _failed(EXIT_FAILURE, given)
    except OutriderError as problem:
        if is_debug:
            traceback.print_exc()
        console.error(problem)
        return _failed(problem.exit_status, given)
    except Exception as problem:
        if is_debug:
            traceback.print_exc()
        hint = "" if is_debug else " (--debug shows the traceback)"
        console.error(f"{type(problem).__name__}: {problem}{hint}")
        return _failed(EXIT_FAILURE, given)
    return EXIT_OK if status is None else int(status)


def _failed(status: int, given: Sequence[str]) -> int:
    """The status of a failure; bench's 1 and 2 are verdicts, so there every failure is 3."""
    return EXIT_INVALID if given[:1] == ["bench"] else status


def _usage_message(problem: CycloptsError) -> str:
    """What was wrong with the command line, and where its flags are explained."""
    verb = " ".join(["outrider", *(problem.command_chain or ())])
    if isinstance(problem, UnusedCliTokensError):
        extra = problem.unused_tokens or []
        return (
            f"unexpected argument {' '.join(extra)!r}: put a prompt with spaces in quotes "
            f"(see: {verb} --help)"
        )
    return f"{problem} (see: {verb} --help)"


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without ``--debug``, and whether tracebacks were asked for."""
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    flags = [word for word in given[:end] if word != "--debug"]
    is_debug = len(flags) < end or os.environ.get("OUTRIDER_DEBUG", "") not in ("", "0")
    return [*flags, *given[end:]], is_debug


if __name__ == "__main__":
    sys.exit(main())
