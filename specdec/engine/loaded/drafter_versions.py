"""The versions of a draft head on an engine's target: which is active, and how good each is.

A version becomes active in two stages. First every rank loads it, between two steps, and reports.
Then, if all have it, one message before a step makes all of them draft with it from that step on.
So either all ranks switch at the same step, or none does. A draft that was made before is verified
as any other: a switch changes how many drafts are accepted. With the verifier `coupled` it changes
no token, and with the other lossless ones no distribution, since a draft is never made by two
versions.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from specdec.speculation.policy.rollback import FirstTokens, RollbackRule
from specdec.types.drafters import (
    CONFIGURED_VERSION,
    DrafterVersion,
    HeadFile,
    VersionState,
)
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.ranks import HeadTarget
from specdec.types.reports.stats import Counts, SpeculationStats

logger = logging.getLogger(__name__)

MAX_VERSIONS = 16
"""Versions to remember; the oldest that are not in use are forgotten first."""


@dataclass
class _Version:
    """A version with the verified drafts of it; an empty draft is not counted.

    latest: whether the first token was accepted, of its latest drafts.
    """

    file: HeadFile
    latest: deque[bool]
    state: VersionState = VersionState.LOADING
    fault: str = ""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_first: int = 0

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_accepted_first += num_accepted_tokens > 0
        self.latest.append(num_accepted_tokens > 0)

    @property
    def speculation(self) -> SpeculationStats:
        return SpeculationStats(self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens)

    def snapshot(self) -> DrafterVersion:
        return DrafterVersion(
            self.file.version,
            self.file.name,
            self.state,
            self.speculation,
            self.num_accepted_first,
            self.fault,
        )


@dataclass
class _Trial:
    """The comparison of the active version, which is new, with the one before it."""

    version: int
    before: int
    first_tokens: FirstTokens  # the latest of the version before
    num_drafts: int = 0
    num_accepted: int = 0
    is_worse: bool = field(default=False, init=False)


class DrafterVersions:
    """Versions of the head of one engine. The engine's thread alone uses it.

    is_pinned: whether a worse version stays until an order replaces it. active: the version that
    drafts from the next step on.
    """

    def __init__(self, configured: HeadFile, rule: RollbackRule | None = None) -> None:
        """Start with the version that the ranks load when they start."""
        assert configured.version == CONFIGURED_VERSION
        self.is_pinned = False
        self.num_rollbacks = 0
        self._rule = rule or RollbackRule()
        self._versions: dict[int, _Version] = {}
        self._add(configured).state = VersionState.ACTIVE
        self.active = self._wanted = CONFIGURED_VERSION
        self._loading: int | None = None
        self._trial: _Trial | None = None

    @property
    def is_settled(self) -> bool:
        """Return whether no version is being loaded."""
        return self._loading is None and self._wanted == self.active

    def snapshot(self) -> tuple[DrafterVersion, ...]:
        """Return all versions, oldest first."""
        return tuple(each.snapshot() for each in self._versions.values())

    def add_to(self, counts: Counts) -> None:
        """Fill in the fields about versions."""
        counts.num_drafter_rollbacks = self.num_rollbacks
        counts.drafts_by_version = {
            str(number): each.speculation for number, each in self._versions.items()
        }

    def load(self, name: str, directory: str) -> int:
        """Order a new version, which is active as soon as all ranks have it; return its number.

        Raises OverloadedError while another one is being loaded.
        """
        self._require_settled()
        number = max(self._versions) + 1
        self._add(HeadFile(number, name, directory))
        self._wanted = number
        self._forget_oldest()
        return number

    def use(self, number: int) -> None:
        """Order an earlier version. Raises InvalidValueError, and OverloadedError as `load` does.

        It is not compared with the one before it, since the order chose between the two.
        """
        if number not in self._versions:
            limit = f"one of {', '.join(map(str, self._versions))}"
            raise InvalidValueError("version", number, limit)
        self._require_settled()
        self._wanted = number

    def observe(
        self, number: int, num_draft_tokens: int, num_accepted_tokens: int, num_verified: int
    ) -> None:
        """Count a verified draft, and order the version before where the active one is worse.

        num_accepted_tokens: to count. num_verified: accepted tokens, also those after a stop, by
        which versions are compared.
        """
        version = self._versions.get(number)
        if version is None or not num_draft_tokens:
            return
        version.record(num_draft_tokens, num_accepted_tokens)
        trial = self._trial
        if trial is None or trial.version != number:
            return
        trial.num_drafts += 1
        trial.num_accepted += num_verified > 0
        if trial.num_drafts in self._rule.looks and not self.is_pinned:
            self._compare(trial)

    def advance(self, target: HeadTarget) -> None:
        """Load and activate the wanted version as far as possible without waiting.

        Called between two steps.
        """
        if self._loading is None:
            if self._wanted == self.active:
                return
            self._loading = self._wanted
            target.begin_head_load(self._versions[self._loading].file)
        fault = target.collect_head_load()
        if fault is None:
            return
        number, self._loading = self._loading, None
        if fault:
            self._fail(number, fault)
        else:
            self._activate(number, target)

    def restart(self) -> None:
        """Follow the replacement of the target, whose ranks have the configured version.

        The version in use is loaded again if enough drafts of it were verified, and its comparison
        continues; otherwise it may be the cause, and the one before it is. A rollback that was
        ordered is complete.
        """
        candidates = dict.fromkeys((self._wanted, self.active, self._before, CONFIGURED_VERSION))
        self._loading, trial = None, self._trial
        self._versions[self.active].state = VersionState.READY
        if trial is not None and trial.is_worse:
            self._end_rollback(trial)
            del candidates[trial.version]
        self._versions[CONFIGURED_VERSION].state = VersionState.ACTIVE
        self.active = self._wanted = CONFIGURED_VERSION
        for number in candidates:
            is_tried = self._versions[number].num_drafts >= self._rule.min_drafts
            if is_tried or number == CONFIGURED_VERSION:
                self._wanted = number
                break
            self._fail(number, "the target was lost before enough of its drafts were verified")
        if self._trial is not None and self._trial.version != self._wanted:
            self._trial = None

    @property
    def _before(self) -> int:
        """The version that a rollback returns to."""
        return self._trial.before if self._trial else CONFIGURED_VERSION

    def _add(self, file: HeadFile) -> _Version:
        version = _Version(file, deque(maxlen=self._rule.window))
        self._versions[file.version] = version
        return version

    def _forget_oldest(self) -> None:
        kept = {CONFIGURED_VERSION, self.active, self._wanted, self._before}
        while len(self._versions) > MAX_VERSIONS:
            del self._versions[next(each for each in self._versions if each not in kept)]

    def _require_settled(self) -> None:
        if not self.is_settled:
            raise OverloadedError("a version of the head is being loaded; try again later")

    def _compare(self, trial: _Trial) -> None:
        now = FirstTokens(trial.num_drafts, trial.num_accepted)
        if not self._rule.is_worse(trial.first_tokens, now) or not self.is_settled:
            return
        trial.is_worse = True
        self._wanted = trial.before
        logger.warning(
            "draft head: version %d accepts %.1f %% of first tokens, version %d %.1f %%: "
            "rolling back",
            *(trial.version, 100 * now.acceptance),
            *(trial.before, 100 * trial.first_tokens.acceptance),
        )

    def _activate(self, number: int, target: HeadTarget) -> None:
        target.switch_head(number)
        trial, before = self._trial, self._versions[self.active]
        before.state = VersionState.READY
        if trial is not None and trial.is_worse:
            self._end_rollback(trial)
        elif trial is not None and trial.version != number:  # else it is loaded again
            self._trial = None
        version = self._versions[number]
        if version.state is VersionState.LOADING:
            latest = FirstTokens(len(before.latest), sum(before.latest))
            self._trial = _Trial(number, self.active, latest)
        version.state, version.fault = VersionState.ACTIVE, ""
        self.active = number
        logger.info("draft head: version %d is active: %s", number, version.file.name)

    def _end_rollback(self, trial: _Trial) -> None:
        self._versions[trial.version].state = VersionState.ROLLED_BACK
        self.num_rollbacks += 1
        self._trial = None

    def _fail(self, number: int, fault: str) -> None:
        logger.warning("draft head: version %d: %s", number, fault)
        version = self._versions[number]
        if version.state is not VersionState.ROLLED_BACK:
            version.state = VersionState.FAILED
        version.fault, self._wanted = fault, self.active
        trial = self._trial
        if trial is not None and (trial.is_worse or trial.version == number):
            self._trial = None  # the version before, or the compared one, cannot come back
