"""The Python interface: load a model once, then generate, stream and chat.

Owns loading in its right order (resolve, plan memory, probe kernels, load, self-test, time) and the
translation between prompts and token ids. Stands above :mod:`outrider.engine`; the command line
stands on it.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.config import (
    DEFAULT_MAX_MODEL_LEN,
    EngineConfig,
    SamplingParams,
    SpeculationConfig,
)
from outrider.costs import CostTable, measure_costs, still_holds
from outrider.drafters import Drafter, DraftSource
from outrider.engine import Engine
from outrider.errors import ParameterError, PromptError
from outrider.grammar import GrammarCompiler
from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.exactness import is_exact, row_policies
from outrider.models.kernels.warmup import compile_kernels
from outrider.models.linear import has_packed_kernels
from outrider.models.loading import LoadedCheckpoint, Tokenizer, load
from outrider.models.loading.cache import cache_root
from outrider.models.loading.hub import DEFAULT_MODEL, resolve
from outrider.models.machine import (
    Fingerprint,
    ResultCache,
    machine_key,
    preferred_dtype,
    processor_name,
)
from outrider.models.memory import MemoryPlan, plan_memory, return_freed_memory
from outrider.pairing import (
    OpenedDrafter,
    TargetFiles,
    build_drafter,
    drafter_items,
    open_drafter,
)
from outrider.request import Request
from outrider.selfcheck import SelfCheck, check_head
from outrider.types import Completion, ProgressCallback, TextChunk, TokenLogprobs, Usage

Prompt = str | Sequence[int]

GREEDY = SamplingParams()

ENOUGH_EVERY = 16  # output tokens between two questions whether a request has enough


class _End:
    """What stands for the end of the jobs, which may hand out None themselves."""


_END = _End()


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """What several :class:`LLM` objects share when only their speculation differs."""

    target: Decoder
    files: TargetFiles
    fingerprint: Fingerprint
    costs: CostTable
    engine: EngineConfig
    max_model_len: int


class LLM:
    """A loaded model that decodes, speculatively or plainly, always to the same text.

    Args:
        model: a catalogue name, a Hugging Face id, a folder or a GGUF file. A catalogue model that
            is not in the cache is fetched.
        speculation: what drafts; None chooses what fits the model best (n-gram in this version).
        engine: batch size, context, precision, threads.
        on_progress: told what is being done and, where known, the fraction done.

    Attributes:
        speculation: what drafts.
        memory_plan: what was allocated.
        warnings: what the head's self-check found, in sentences; mostly empty.

    Raises:
        OutriderError: see :mod:`outrider.errors`; nothing stays allocated.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        speculation: SpeculationConfig | None = None,
        engine: EngineConfig | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        speculation = SpeculationConfig() if speculation is None else speculation
        engine = EngineConfig() if engine is None else engine
        _check_type("speculation", speculation, SpeculationConfig)
        _check_type("engine", engine, EngineConfig)
        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        path = resolve(model, pull=True, on_progress=on_progress)
        checkpoint = load(path, on_progress=on_progress)
        files = TargetFiles.of(path, checkpoint)
        opened = None
        try:
            opened = open_drafter(speculation, files, on_progress)
            source = None if opened is None else opened.source
            self.memory_plan = plan_pair(files.config, speculation, engine, source)
            self.memory_plan.check()
            self._loaded = _load_model(checkpoint, files, engine, on_progress)
        except BaseException:
            checkpoint.weights.close()
            if opened is not None:
                opened.close()
            raise
        self._start(speculation, opened, on_progress)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokeniser and chat template."""
        return self.files.tokenizer

    @property
    def engine(self) -> Engine:
        """What runs the requests, for whoever schedules them himself, as the server does."""
        return self._engine

    @property
    def target(self) -> Decoder:
        """The loaded model itself, for what looks at its states."""
        return self._loaded.target

    @property
    def files(self) -> TargetFiles:
        """What the target was loaded from."""
        return self._loaded.files

    @property
    def engine_config(self) -> EngineConfig:
        """Batch size, precision, threads, as asked for."""
        return self._loaded.engine

    @property
    def config(self) -> DecoderConfig:
        """The model's architecture."""
        return self.target.config

    @property
    def fingerprint(self) -> Fingerprint:
        """Weights, kernels, precision, threads and exactness level."""
        return self._loaded.fingerprint

    @property
    def costs(self) -> CostTable:
        """What the target's pass takes, as measured at start-up."""
        return self._loaded.costs

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens of one request."""
        return self._loaded.max_model_len

    def with_speculation(
        self, speculation: SpeculationConfig, *, on_progress: ProgressCallback | None = None
    ) -> LLM:
        """The same loaded weights with other speculation; both stay usable side by side.

        The new object has a cache of its own, and its memory plan lists nothing that is shared.

        Raises:
            CapacityError: a second cache does not fit.
            OutriderError: as at construction, for what the drafter reads.
        """
        _check_type("speculation", speculation, SpeculationConfig)
        other = object.__new__(LLM)
        other._loaded = self._loaded
        opened = open_drafter(speculation, self._loaded.files, on_progress)
        try:
            source = None if opened is None else opened.source
            plan = plan_pair(self.config, speculation, self._loaded.engine, source)
            other.memory_plan = plan.without_weights()
            other.memory_plan.check()
        except BaseException:
            if opened is not None:
                opened.close()
            raise
        other._start(speculation, opened, on_progress)
        return other

    def _start(
        self,
        speculation: SpeculationConfig,
        opened: OpenedDrafter | None,
        on_progress: ProgressCallback | None,
    ) -> None:
        """Build drafter and engine on the loaded model, and check a head."""
        loaded = self._loaded
        drafter = build_drafter(
            speculation,
            opened,
            loaded.target,
            max_batch_size=loaded.engine.max_batch_size,
            max_model_len=loaded.max_model_len,
        )
        self.speculation = speculation
        self._engine = _new_engine(loaded, speculation, drafter)
        self.warnings = _check_head(loaded, opened, drafter, on_progress)
        return_freed_memory()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        on_chunk: Callable[[int, TextChunk], None] | None = None,
    ) -> list[Completion]:
        """Complete all prompts, up to ``max_batch_size`` at once; results in prompt order.

        A string is raw text, a sequence of integers is token ids. ``on_chunk`` gets the index of
        the prompt and each new piece of text as it comes. Interrupted (Ctrl-C, an exception in
        ``on_chunk``), all requests are aborted and the object stays usable.

        Raises:
            PromptError: a prompt is empty, too long, or has an id outside the vocabulary.
            ParameterError: the number of params is neither one nor that of the prompts.
        """
        prompt_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        all_params = _one_each(params, len(prompt_ids))
        requests = [
            self._engine.new_request(ids, param)
            for ids, param in zip(prompt_ids, all_params, strict=True)
        ]
        taken = [0] * len(prompt_ids)
        completions: dict[int, Completion] = {}
        try:
            for request in requests:
                self._engine.submit(request)
            while len(completions) < len(requests):
                self._engine.step()
                for index, request in enumerate(requests):
                    # Asked of each, not of step(): a stream may have advanced it, even to its end.
                    is_new = request.num_output > taken[index] or request.finish_reason is not None
                    if index in completions or not is_new:
                        continue
                    chunk = self.take(request, taken[index])
                    taken[index] += len(chunk.token_ids)
                    if chunk.completion is not None:
                        completions[index] = chunk.completion
                    if on_chunk is not None:
                        on_chunk(index, chunk)
        finally:
            for request in requests:
                self._engine.abort(request)
        return [completions[index] for index in range(len(requests))]

    def generate_each(
        self,
        jobs: Iterable[tuple[Prompt, SamplingParams] | None],
        *,
        is_enough: Callable[[Sequence[int]], bool] | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Complete any number of prompts and yield (index, completion) of each as it ends.

        ``jobs`` is read as rows become free, so it may be endless, and may depend on what was
        yielded: it hands out None where nothing is ready before the next completion.
        ``is_enough`` is asked with the first ``ENOUGH_EVERY`` output tokens of a request, the first
        twice as many and so on, and aborts it when True; a few more tokens may have come by then.
        Closed or interrupted, all requests are aborted.

        Raises:
            PromptError: a prompt is empty, too long, or has an id outside the vocabulary.
            ParameterError: ``jobs`` hands out None while nothing runs, so nothing could change.
        """
        waiting = iter(jobs)
        running: dict[int, Request] = {}
        asked: dict[int, int] = {}
        num_taken, is_drained = 0, False
        try:
            while running or not is_drained:
                while not is_drained and len(running) < self._loaded.engine.max_batch_size:
                    job = next(waiting, _END)
                    if job is None and running:
                        break
                    if job is None:
                        raise ParameterError("jobs: None while nothing runs; end it instead")
                    if isinstance(job, _End):
                        is_drained = True
                        continue
                    prompt, params = job
                    request = self._engine.new_request(self._encode(prompt), params)
                    self._engine.submit(request)
                    running[num_taken] = request
                    num_taken += 1
                self._engine.step()
                if is_enough is not None:
                    self._abort_enough(running, asked, is_enough)
                ended = [i for i, request in running.items() if request.finish_reason is not None]
                for index in ended:
                    asked.pop(index, None)
                    yield index, self._completion(running.pop(index))
        finally:
            for request in running.values():
                self._engine.abort(request)

    def _abort_enough(
        self,
        requests: Mapping[int, Request],
        asked: dict[int, int],
        is_enough: Callable[[Sequence[int]], bool],
    ) -> None:
        """Abort the requests that have enough; ``asked`` is how many tokens were shown of each."""
        for index, request in requests.items():
            first = asked.get(index, 0) + ENOUGH_EVERY
            for end in range(first, request.num_output + 1, ENOUGH_EVERY):
                asked[index] = end
                start = request.prompt_len
                if is_enough(request.token_ids[start : start + end]):
                    self._engine.abort(request)
                    break

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY
    ) -> Generator[TextChunk, None, None]:
        """Yield pieces of text as they come; the last one carries the completion.

        What is wrong with the prompt is raised here, the request starts with the first ``next``,
        closing the generator aborts it. Several may be open at once; each advances all.
        """
        request = self._engine.new_request(self._encode(prompt), params)
        return self._stream(request)

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams = GREEDY
    ) -> Completion:
        """Answer a conversation of ``{"role": ..., "content": ...}`` messages."""
        return self.generate([self.tokenizer.encode_chat(messages)], params)[0]

    def stream_chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams = GREEDY
    ) -> Generator[TextChunk, None, None]:
        """Like :meth:`chat`, piece by piece."""
        return self.stream(self.tokenizer.encode_chat(messages), params)

    def take(self, request: Request, taken: int) -> TextChunk:
        """What came of a request of :attr:`engine` behind the first ``taken`` output tokens.

        Its text is what was not handed out yet, so each piece comes once; the completion comes
        with the call after the request's end.
        """
        with self._engine.lock:
            tokens = tuple(request.token_ids[request.prompt_len + taken :])
            completion = None if request.finish_reason is None else self._completion(request)
            logprobs = _logprobs(request, taken)
            return TextChunk(request.output.take_text(), tokens, completion, logprobs)

    def _stream(self, request: Request) -> Generator[TextChunk, None, None]:
        taken = 0
        self._engine.submit(request)
        try:
            while True:
                if request.finish_reason is None:
                    self._engine.step()
                chunk = self.take(request, taken)
                taken += len(chunk.token_ids)
                yield chunk
                if chunk.completion is not None:
                    return
        finally:
            self._engine.abort(request)

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            text=request.output.text,
            token_ids=tuple(request.token_ids[request.prompt_len :]),
            finish_reason=request.finish_reason,
            usage=Usage(request.prompt_len, request.num_output, request.num_reused),
            method=self.speculation.method if request.speculates else "off",
            speculation=request.stats,
            timing=request.timing(),
            fingerprint=self.fingerprint.text,
            seed=request.sampler.seed,
            error=request.error,
            logprobs=_logprobs(request),
            prediction=None if request.prediction is None else request.prediction.stats,
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            if isinstance(prompt, bytes | bytearray | Mapping):
                raise TypeError
            return [_token_id(token) for token in prompt]
        except TypeError:
            raise PromptError(
                f"prompt: {reprlib.repr(prompt)} is neither a string nor a sequence of token ids"
            ) from None


def _logprobs(request: Request, taken: int = 0) -> tuple[TokenLogprobs, ...] | None:
    """Those of the output tokens behind the first ``taken``, if they were asked for."""
    if request.params.logprobs is None:
        return None
    return tuple(request.output.logprobs[taken:])


def plan_pair(
    config: DecoderConfig,
    speculation: SpeculationConfig,
    engine: EngineConfig,
    source: DraftSource | None,
) -> MemoryPlan:
    """The memory plan of a target with these settings, and of the drafter that reads ``source``."""
    sizes: dict[str, Any] = {
        "dtype": resolve_dtype(engine.dtype),
        "max_batch_size": engine.max_batch_size,
        "max_model_len": resolve_max_model_len(config, engine),
    }
    plan = plan_memory(
        config,
        max_draft_tokens=speculation.num_draft_tokens,
        prefill_chunk=engine.prefill_chunk,
        **sizes,
    )
    return plan if source is None else plan.plus(drafter_items(source, speculation, **sizes))


def _load_model(
    checkpoint: LoadedCheckpoint,
    files: TargetFiles,
    engine: EngineConfig,
    on_progress: ProgressCallback | None,
) -> _LoadedModel:
    """Probe, load, test and time, in this order."""
    config = checkpoint.config
    dtype = resolve_dtype(engine.dtype)
    max_model_len = resolve_max_model_len(config, engine)
    results = ResultCache(cache_root(), is_trusted=engine.self_test != "always")
    compile_kernels(dtype, on_progress)
    policies = row_policies(config, dtype, results, on_progress)

    def on_layer(fraction: float) -> None:
        if on_progress is not None:
            on_progress("loading weights", fraction)

    target = Decoder(config, checkpoint.weights, dtype=dtype, policies=policies, on_layer=on_layer)
    checkpoint.weights.close()
    weights_hash = checkpoint.weights_hash
    exact = None
    if engine.self_test != "off":
        exact = is_exact(target, weights_hash, results, on_progress)
    fingerprint = Fingerprint(
        model=checkpoint.name,
        weights_hash=weights_hash,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        processor=processor_name(),
        torch_version=torch.__version__,
        kernels="oneDNN packed" if has_packed_kernels(dtype) else "stock",
        is_exact=exact,
    )
    costs = _cost_table(target, weights_hash, max_model_len, results, on_progress)
    return _LoadedModel(target, files, fingerprint, costs, engine, max_model_len)


def _cost_table(
    target: Decoder,
    weights_hash: str,
    max_model_len: int,
    results: ResultCache,
    on_progress: ProgressCallback | None,
) -> CostTable:
    """The target's cost table: the one remembered for this machine and model while it holds."""
    key = f"costs {weights_hash} {machine_key(target.dtype)} {max_model_len}"
    known = results.get(key, CostTable.from_json)
    if known is not None and still_holds(known, target):
        return known
    costs = measure_costs(target, max_model_len, on_progress)
    results.put(key, asdict(costs))
    return costs


def _new_engine(
    loaded: _LoadedModel, speculation: SpeculationConfig, drafter: Drafter | None
) -> Engine:
    tokenizer = loaded.files.tokenizer
    return Engine(
        loaded.target,
        decoder=tokenizer,
        eos_ids=tokenizer.eos_ids,
        config=loaded.engine,
        max_model_len=loaded.max_model_len,
        drafter=drafter,
        max_draft_tokens=speculation.num_draft_tokens,
        costs=loaded.costs if speculation.adaptive else None,
        uses_blocks=speculation.block_verification,
        grammars=GrammarCompiler(tokenizer, loaded.target.config.vocab_size),
    )


def _check_head(
    loaded: _LoadedModel,
    opened: OpenedDrafter | None,
    drafter: Drafter | None,
    on_progress: ProgressCallback | None,
) -> tuple[str, ...]:
    """The self-check's warnings about a head, from its first use on this machine or remembered."""
    if opened is None or drafter is None or loaded.engine.self_test == "off":
        return ()
    results = ResultCache(cache_root(), is_trusted=loaded.engine.self_test != "always")
    fingerprint, target = loaded.fingerprint, loaded.target
    key = f"head {opened.weights_hash} {fingerprint.weights_hash} {machine_key(target.dtype)}"
    found = results.get(key, SelfCheck.from_json)
    if found is None:
        found = check_head(
            drafter,
            target,
            loaded.files.tokenizer,
            recorded=None if opened.head is None else opened.head.recorded_acceptance,
            on_progress=on_progress,
        )
        if found is None:
            return ()
        results.put(key, asdict(found))
    return tuple(found.warnings())


def resolve_dtype(name: str) -> torch.dtype:
    """The precision in force."""
    if name == "auto":
        return preferred_dtype()
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def resolve_max_model_len(config: DecoderConfig, engine: EngineConfig) -> int:
    """The context in force.

    Raises:
        ParameterError: more was asked for than the model's positions reach.
    """
    if engine.max_model_len is None:
        return min(config.max_position, DEFAULT_MAX_MODEL_LEN)
    if engine.max_model_len > config.max_position:
        raise ParameterError(
            f"max_model_len: {engine.max_model_len} is beyond the model's context of "
            f"{config.max_position} tokens; allowed: 2 .. {config.max_position}"
        )
    return engine.max_model_len


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not hasattr(prompts, "__iter__"):
        return [prompts]  # type: ignore[list-item]  # one string, or what _encode refuses
    items = list(prompts)
    if items and all(hasattr(item, "__index__") for item in items):
        return [items]  # type: ignore[list-item]  # all are integers: one prompt's ids
    return items  # type: ignore[return-value]


def _token_id(token: object) -> int:
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)  # type: ignore[arg-type]  # anything else raises TypeError


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise ParameterError(
            f"{name}: {reprlib.repr(value)} is not a {expected.__name__}; give one, or None"
        )


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        _check_type("params", params, SamplingParams)
    if len(params) != count:
        raise ParameterError(
            f"params: {len(params)} for {count} prompts; give one for all or one for each"
        )
    return list(params)
