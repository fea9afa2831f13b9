"""Plans the memory of an engine, loads its models and makes it, for a replica and `specdec.LLM`."""

from __future__ import annotations

import logging
from functools import partial
from typing import Generic, TypeVar

from specdec.config.llm import LLMConfig
from specdec.engine.engine import Engine
from specdec.engine.engine_profiler import EngineProfiler
from specdec.engine.executor import DraftModel, Executor
from specdec.engine.head_probe import HeadProbe, likely_causes
from specdec.engine.lifecycle import LoadedEngine, SpeculationSettings
from specdec.engine.loaded.adapters import Adapters
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.metrics.metrics import Metrics, StepRecorder
from specdec.engine.models.model_limits import draft_adapter_fault
from specdec.engine.models.model_resolution import Models, with_resolved_dtype
from specdec.engine.orders.adapter_control import AdapterControl
from specdec.engine.orders.drafter_control import DrafterControl
from specdec.models.config.decoder_tensors import linear_layers
from specdec.models.resolve import portable_name
from specdec.speculation.proposers import load_corpora
from specdec.text.tokenizer import Tokenizer
from specdec.types.drafters import CONFIGURED_VERSION, HeadFile
from specdec.types.errors import BadLogitsError

Config = TypeVar("Config", bound=LLMConfig)

logger = logging.getLogger(__name__)


class EngineSetup(Generic[Config]):
    """An engine before its models are loaded: configuration, plan and metrics.

    `load` returns the engine of loaded models, and `LoadedEngine.start_thread` runs it.

    adapters: None where none can be loaded.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        target_bytes: int,
        draft_bytes: int | None = None,
        *,
        in_process: bool = False,
    ) -> None:
        """Plan the memory; the sizes are those of `memory_plan`, whose errors it raises."""
        self.config = with_resolved_dtype(config, models)
        self.model = models.target
        self.plan = memory_plan(
            self.config, models, target_bytes, draft_bytes, in_process=in_process
        )
        self.metrics = Metrics()
        self._models = models
        limits = self.plan.engine.adapters
        self.adapters = None if limits is None else Adapters(limits.max_loaded)
        speculation = config.speculative_config
        self.settings = SpeculationSettings(speculation.control if speculation else None)

    def load(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        recorder: StepRecorder | None = None,
    ) -> LoadedEngine:
        """Measure the models and make the engine, which takes seconds. From any thread.

        recorder: None for `metrics`.
        """
        versions = self._drafter_versions()
        acceptance = self._probe_head(executor, tokenizer)
        policy, control, speculation = None, self.settings.control, executor.speculation
        if control is not None:
            profiler = EngineProfiler(self.plan.engine, self.model, tokenizer)
            measured = profiler.measure, profiler.text
            policy = executor.measure(
                lambda target: speculation.make_policy(control, target, *measured)
            )
        proposer = speculation.make_proposer()
        load_corpora(proposer, partial(tokenizer.encode, add_special_tokens=False))
        engine = Engine(
            self.plan.engine,
            self.model,
            executor.target,
            tokenizer,
            proposer,
            policy,
            drafters=versions,
            adapters=self.adapters,
            recorder=recorder or self.metrics,
        )
        adapters = self._load_adapters(engine, executor, speculation.model)
        drafters = None
        if versions is not None and self._models.head is not None:
            drafters = DrafterControl(engine, versions, self._models.head)
        return LoadedEngine(
            engine, executor, self.metrics, self.settings, drafters, adapters, acceptance
        )

    def _load_adapters(
        self, engine: Engine, executor: Executor, draft_model: DraftModel | None
    ) -> AdapterControl | None:
        """Load the adapters of the configuration. Raises what `AdapterControl.execute` raises."""
        limits, orders = self.plan.engine.adapters, self.config.startup_adapters
        if limits is None or self.adapters is None:
            return None
        self.adapters.drafter = draft_model
        fault = draft_adapter_fault(self.config, self._models.draft)
        layers = linear_layers(self.model) if self.model.transformers is None else None
        name = self.config.request_name
        control = AdapterControl(engine, self.adapters, limits, name, fault, layers=layers)
        executor.measure(lambda _: control.load_all(orders))
        return control

    def _drafter_versions(self) -> DrafterVersions | None:
        """Return the versions of the draft head, the configured one alone; None without a head."""
        config, head = self.config.head, self._models.head
        if config is None or head is None:
            return None
        name = config.model or self.config.model
        file = HeadFile(CONFIGURED_VERSION, portable_name(name), str(head.directory))
        return DrafterVersions(file)

    def _probe_head(self, executor: Executor, tokenizer: Tokenizer) -> float | None:
        """Return the acceptance of a head's drafts, which is low where it does not fit the target.

        Returns None where it was not measured. Logs a warning where it is low.
        """
        if self._models.head is None:
            return None
        probe = HeadProbe(self.plan.engine, tokenizer, self.model.eos_token_ids)
        try:
            result = executor.measure(probe.measure)
        except BadLogitsError as error:
            logger.warning("draft head: not probed: the target cannot continue a text: %s", error)
            return None
        if result is None:
            return None
        if result.is_sound:
            logger.info("draft head: %s", result.describe())
            return result.acceptance
        causes = likely_causes(result, self._models.head, self.config.model)
        logger.warning(
            "draft head: %s%s; %s. The head was %s",
            result.describe(),
            ", which is low" if result.is_low else "",
            "; ".join(causes)
            or "it may belong to another target, or its layers, norms or rope "
            "differ from what its files were taken for",
            self._models.head.describe()[0],
        )
        return result.acceptance
