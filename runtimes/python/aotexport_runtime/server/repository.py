"""The models of a repository: found, proved, swapped, let go. Knows no server and no torch.

A model is served by a servable that has passed its self-test, or not at all.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aotexport_runtime.errors import AotExportError, attempt, first_line
from aotexport_runtime.server.bundles import Candidate, Fingerprint, find_models, misplaced, places
from aotexport_runtime.server.messages import Signature
from aotexport_runtime.server.refusals import Refusal
from aotexport_runtime.serving.servable import Servable

if TYPE_CHECKING:
    from aotexport_runtime.serving.generator import Generator

    AnyServable = Servable | Generator

log = logging.getLogger("aotexport_runtime.server")

State = Literal["READY", "UNAVAILABLE", "LOADING"]
Event = Literal["loaded", "failed", "unloaded"]
Watcher = Callable[[str, str, Event], None]
"""Is told of a model, its version, and what happened to it."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A version of a model that has passed its self-test."""

    bundle: Candidate
    servable: AnyServable
    signature: Signature

    @property
    def version(self) -> str:
        """Number of the version."""
        return self.bundle.version


@dataclass(kw_only=True)
class Model:
    """A model of the repository.

    Attributes:
        name: of its directory.
        candidates: its bundles that may be served, the newest version first.
        chosen: those of them that it is, or was last, served from, in their order.
        served: what answers its calls, by version; empty: it is not loaded.
        signatures: of versions that were loaded.
        failures: why each bundle that was tried is not served.
        refused: whether a client unloaded it.
        last_used: when it was last asked for, by `time.monotonic`.
    """

    name: str
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    chosen: tuple[Candidate, ...] = ()
    served: dict[str, Served] = field(default_factory=dict[str, Served])
    signatures: dict[str, Signature] = field(default_factory=dict[str, Signature])
    failures: dict[Fingerprint, str] = field(default_factory=dict[Fingerprint, str])
    refused: bool = False
    last_used: float = 0.0

    @property
    def state(self) -> State:
        """State of the model in the protocol's index."""
        if self.chosen and not self.refused:
            return "READY"
        return "UNAVAILABLE" if self.failures or self.refused else "LOADING"

    @property
    def is_settled(self) -> bool:
        """Whether it is served, or a client has unloaded it."""
        return self.refused or self.state == "READY"

    @property
    def reason(self) -> str:
        """Why versions that should be served are not; empty: they are, or will be when they are asked for."""
        if self.refused:
            return "unloaded"
        failed = [(bundle.version, self.failures.get(bundle.files)) for bundle in self.candidates]
        return "; ".join(f"version {version}: {failure}" for version, failure in failed if failure)

    def of(self, version: str) -> Served | None:
        """Return what answers calls of a version; empty: of any, by the weights of `chosen`, else the newest."""
        if version or not self.served:
            return self.served.get(version)
        weights = [bundle.weight for bundle in self.chosen if bundle.version in self.served]
        served = [*self.served.values()]
        return random.choices(served, weights)[0] if len(served) == len(weights) and any(weights) else served[0]


class Repository:
    """The models below a directory. Changes wait for one another; `current` waits for nothing.

    Attributes:
        models: by name, also those that cannot be served.
        is_empty: whether the last look found no bundle; None: there was no look. What is served stays.
    """

    is_empty: bool | None = None

    def __init__(
        self,
        root: Path,
        make: Callable[[Path], AnyServable],
        *,
        name: str | None = None,
        versions: str = "newest",
        required: Collection[str] = (),
        strict: bool = True,
        most_nbytes: int | None = None,
        watcher: Watcher = lambda model, version, event: None,
    ) -> None:
        """Look at nothing yet; see `scan`.

        Args:
            root: see `find_models`, as for `name`.
            make: returns the servable of a bundle, which has not run yet.
            name: of the one model.
            versions: those of each model that are served: `newest` (that passes), `all`, or numbers: `1,3`.
            required: names of models that have to be served, as `name` has, see `unready`.
            strict: whether those of the first look that finds any have to be served as well, as long as they are there.
            most_nbytes: of the bundles that are loaded at once, which go and come as asked for; None: any number.
            watcher: is told what happens.
        """
        self._root = root
        self._make = make
        self._name = name
        self._is_newest = versions == "newest"
        self._versions = None if versions in ("newest", "all") else {*versions.split(",")}
        self._required = {*required, *([name] if name else [])}
        self._strict = strict
        self._first: set[str] = set()
        self._most_nbytes = most_nbytes
        self._watcher = watcher
        self._lock = threading.RLock()
        self._seen: dict[Path, Fingerprint] | None = None
        self._ending: dict[AnyServable, threading.Thread] = {}
        self.models: dict[str, Model] = {}

    @property
    def running_since(self) -> float | None:
        """When the batch began that runs longest, of versions that are let go as well; None: none runs."""
        servables = [served.servable for model in [*self.models.values()] for served in model.served.values()]
        running = [each.batcher.running_since for each in [*servables, *self._ending]]
        return min((since for since in running if since is not None), default=None)

    @property
    def unready(self) -> str:
        """Why what was promised is not served, or nothing is; empty: it is, or a client unloaded it."""
        models, looked_at = {**self.models}, places(self._root, self._name)
        is_any = any(model.is_settled for model in models.values())
        reasons: list[str] = []
        for name in sorted(self._required | self._first | (set() if is_any else models.keys())):
            model = models.get(name)
            if model is None:
                reasons.append(f"there is no model `{name}`: no bundle is at {looked_at}")
            elif not model.is_settled:
                reasons.append(f"model `{name}` is not served: {model.reason or 'it is being loaded'}")
        return "; ".join(reasons) or ("" if is_any else f"no bundle is at {looked_at}")

    def model(self, name: str) -> Model:
        """Return the model called `name`; `Refusal`: there is none."""
        found = self.models.get(name)
        if found is None:
            raise Refusal(f"there is no model `{name[:100]}`", "not_found")
        return found

    def current(self, name: str, version: str = "") -> Served | None:
        """Return what answers calls of a model now; None: it is to be loaded first, by `demand`.

        An empty `version` is any that is served, see `Model.of`.

        Raises:
            Refusal: no such model or version, or it cannot be served.
        """
        model = self.model(name)
        model.last_used = time.monotonic()
        if model.refused:
            raise Refusal(f"model `{name}` is unloaded; load it first", "unavailable")
        if model.state == "UNAVAILABLE":
            raise Refusal(f"model `{name}` cannot be served: {model.reason}", "unavailable")
        served = model.of(version)
        if served is None and version and model.served:
            there = f"{', '.join(model.served)} {'is' if len(model.served) == 1 else 'are'}"
            raise Refusal(f"model `{name}` has no version `{version[:20]}` that is served; {there}", "not_found")
        return served

    def demand(self, name: str) -> None:
        """Load a model that is to be loaded when it is asked for; `Refusal`: it cannot be served."""
        with self._lock:
            model = self.model(name)
            if not model.served and not model.refused:
                self._choose(model)
            if not model.served:
                raise Refusal(f"model `{name}` cannot be served: {model.reason or 'it is gone'}", "unavailable")

    def load(self, name: str) -> None:
        """Load the versions of a model, also where it was unloaded or has failed before.

        Raises:
            Refusal: there is no such model, or one fails; what is served stays.
        """
        with self._lock:
            candidates = self._found().get(name)
            if candidates is None:
                raise Refusal(f"there is no model `{name[:100]}`", "not_found")
            model = self.models.setdefault(name, Model(name=name))
            model.candidates, model.refused = candidates, False
            model.failures.clear()
            self._choose(model)
            if model.reason:
                raise Refusal(f"model `{name}` is not loaded: {model.reason}")

    def unload(self, name: str) -> None:
        """Let a model go, until it is loaded by name; `Refusal`: there is none."""
        with self._lock:
            model = self.model(name)
            model.refused = True
            self._let_go(model, "a client unloaded it")

    def find(self) -> dict[str, list[Candidate]]:
        """Return the bundles of each model, and load none: calls of new models wait until they are loaded.

        Where there is no bundle any more, what is served stays.
        """
        found = self._found()
        with self._lock:
            self._tell(found)
            if not found and any(model.chosen for model in self.models.values()):
                return found
            if self._strict and not self.models:
                self._first = set(found)
            for name in [name for name in self.models if name not in found]:
                self._first.discard(name)
                self._let_go(self.models.pop(name), "its bundles are gone")
            for name, candidates in found.items():
                model = self.models.setdefault(name, Model(name=name))
                model.candidates = candidates
                model.failures = {b.files: model.failures[b.files] for b in candidates if b.files in model.failures}
        return found

    def _found(self) -> dict[str, list[Candidate]]:
        """Return the bundles of each model that may be served."""
        may = self._versions
        found = find_models(self._root, self._name)
        found = {
            name: [each for each in bundles if may is None or each.version in may] for name, bundles in found.items()
        }
        return {name: bundles for name, bundles in found.items() if bundles}

    def _tell(self, found: dict[str, list[Candidate]]) -> None:
        """Log what is wrong with the repository, once."""
        looked_at = {"looked_at": places(self._root, self._name)}
        if self.is_empty is None:
            for path in misplaced(self._root, found):
                log.error("bundle is where none is looked for", extra={"fields": {"path": str(path), **looked_at}})
        if not found and not self.is_empty:
            kept = [model.name for model in self.models.values() if model.chosen]
            log.error("repository holds no bundle", extra={"fields": {**looked_at, "kept": kept}})
        self.is_empty = not found

    def scan(self) -> None:
        """Look for new, changed and removed bundles, and serve those of each model that pass."""
        found = self.find()
        for model in [*self.models.values()] if found else ():
            with self._lock:
                if not model.refused:
                    self._choose(model, watching=True)
        self._seen = {bundle.path: bundle.files for bundles in found.values() for bundle in bundles}

    def forget_failures(self) -> None:
        """Let the next look try again what has failed."""
        with self._lock:
            for model in self.models.values():
                model.failures.clear()

    def close(self) -> None:
        """Let every model go when it has answered what it was asked."""
        with self._lock:
            for model in self.models.values():
                self._let_go(model, "the server ends")
            self._wait_for_endings()

    def _wait_for_endings(self) -> None:
        for thread in [*self._ending.values()]:
            thread.join()

    def _choose(self, model: Model, *, watching: bool = False) -> None:
        """Serve the newest version that passes, or each that does; what is served stays where none does.

        With `watching`, leave alone what is being copied, as it has changed since the last look, and what was let go
        until it is asked for.
        """
        chosen = {bundle.version: bundle for bundle in model.chosen}
        kept: dict[str, Candidate] = {}
        for bundle in model.candidates:
            old, is_loaded = chosen.get(bundle.version), bundle.version in model.served
            if old is not None and old.files == bundle.files and (watching or is_loaded):
                kept[bundle.version] = bundle
            elif watching and self._seen is not None and self._seen.get(bundle.path) != bundle.files:
                if self._is_newest:
                    return
                kept |= {bundle.version: old} if old is not None else {}
            elif bundle.files not in model.failures and self._try(model, bundle):
                kept[bundle.version] = bundle
            elif old is not None and is_loaded:
                kept[bundle.version] = old
            if kept and self._is_newest:
                break
        if not kept and model.served:
            return
        model.chosen = tuple(kept.values())
        ending = [served for version, served in model.served.items() if version not in kept]
        model.served = {version: model.served[version] for version in kept if version in model.served}
        there = {bundle.version for bundle in model.candidates}
        for old in ending:  # Other models do not wait for what they still answer.
            self._end(model.name, old, "another is served" if old.version in there else "its bundle is gone")

    def _try(self, model: Model, bundle: Candidate) -> bool:
        """Load a bundle beside those that are served, prove it, and swap; return whether it is served."""
        began = time.monotonic()

        def load() -> tuple[AnyServable, Signature]:
            self._make_room(model, bundle)
            servable = self._make(bundle.path)
            servable.warm_up()
            return servable, Signature.of(servable.inputs, servable.outputs, servable.texts)

        # Whatever a bundle does, the others are served.
        found = attempt(load)
        if isinstance(found, Exception):
            known = isinstance(found, AotExportError)
            reason = " ".join(str(found).split())[:1000] if known else f"{type(found).__name__}: {first_line(found)}"
            model.failures[bundle.files] = reason
            fields = {"model": model.name, "version": bundle.version, "reason": reason}
            log.error("model is not loaded", extra={"fields": fields})
            self._watcher(model.name, bundle.version, "failed")
            return False
        servable, signature = found
        old = model.served.get(bundle.version)
        served = {bundle.version: Served(bundle=bundle, servable=servable, signature=signature)}
        model.signatures[bundle.version] = signature
        model.served = dict(sorted(({**model.served, **served}).items(), key=lambda each: -int(each[0])))
        fields = {"model": model.name, "version": bundle.version, "seconds": round(time.monotonic() - began, 3)}
        fields |= {"joined_along": servable.batch_axes and servable.batch_axes.name, "not_joined": servable.not_joined}
        fields |= {"engine": servable.engine}
        log.info("model is served", extra={"fields": fields})
        self._watcher(model.name, bundle.version, "loaded")
        if old is not None:
            self._end(model.name, old, "its bundle is another")
        return True

    def _make_room(self, model: Model, bundle: Candidate) -> None:
        if self._most_nbytes is None:
            return
        self._wait_for_endings()
        if bundle.nbytes > self._most_nbytes:
            raise Refusal(
                f"it takes {bundle.nbytes} bytes, more than all models may: {self._most_nbytes}", "unavailable"
            )
        loaded = sorted((m for m in self.models.values() if m.served and m is not model), key=lambda m: m.last_used)
        for other in loaded:
            served = [each.bundle.nbytes for m in self.models.values() for each in m.served.values()]
            if sum(served) + bundle.nbytes <= self._most_nbytes:
                return
            self._let_go(other, "others need its memory")

    def _let_go(self, model: Model, reason: str) -> None:
        ending, model.served = model.served, {}
        for thread in [self._end(model.name, old, reason) for old in ending.values()]:
            thread.join()

    def _end(self, name: str, old: Served, reason: str) -> threading.Thread:
        """Let a version answer what it was asked, and close it; return the thread that does."""
        log.info("model is let go", extra={"fields": {"model": name, "version": old.version, "reason": reason}})

        def end() -> None:
            old.servable.close()
            del self._ending[old.servable]
            self._watcher(name, old.version, "unloaded")
            gc.collect()

        thread = self._ending[old.servable] = threading.Thread(target=end, name="aotexport end", daemon=True)
        thread.start()
        return thread
