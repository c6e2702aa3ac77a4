"""Compiles a job's model in a worker process on the host. The results are cached by content."""

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from csdctl.documents import load_kept
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.shipping.store import StoredFile, store_file
from csdctl.shipping.worker_calls import WorkerProgram
from csdctl.transport.commands import build_worker_command
from csdctl.transport.meter import TrafficClass
from csdctl.transport.program import within
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.durable_files import replacing_directory, save_text
from csdctl.worker.protocol.features import FLOAT32
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.model_info import Compiled, CompileRequest, CompileRequests
from csdctl.worker.protocol.packages import TENSORFLOW, find_version
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import Prefix
from csdctl.workflows.data.files import SerializedModel, load_intact, seal
from csdctl.workflows.workspace.workspace import Workspace

FILES = ("graph.pb", "info.json", "state.npz")
TEMPLATES = ("template.keras", "template.weights.h5")
"""The model as Keras saves it; only the host needs it."""
OF_RANKS = tuple(f"ranks/{name}" for name in FILES)
"""The step of the ranks that compute the first part of a model, which is cut in two."""
REASON = "reason.json"
DEADLINE_S = 600.0
NO_DATA = DatasetInfo("", 0, (), "", label_shape=(), max_label=-1, fingerprint="")

Compilation = tuple[SerializedModel, CompileRequest, str]
"""A model, the request to compile it, and what that is, in words."""


def start_compiling(worker: StoredFile, space: Workspace) -> WorkerProgram:
    """Start the process that compiles, which loads TensorFlow before it reads its request."""
    argv = build_worker_command(sys.executable, worker.path, ["compile"])
    program = WorkerProgram(space.sessions[HOST_NAME], argv, "compiling the model", within(DEADLINE_S))
    space.after.callback(program.close)
    return program


@dataclass(frozen=True)
class ModelCompiler:
    """Compiles a job's model. All that is not in the cache is compiled by one process."""

    job: Job
    model: SerializedModel
    public: DatasetInfo
    """The prepared data, whose shapes and types count."""
    worker: StoredFile
    space: Workspace
    say: Say

    def step(self, program: WorkerProgram | None = None, *, is_wide: bool = False) -> SerializedModel:
        """Return the model with its compiled step, or without. Raises InputError if ranks cannot train it.

        `program`: if it was started ahead. `is_wide`: the step computes in 32 bits at least.
        """
        request = self._step_of(self.model, self.public, is_wide=is_wide)
        compilations: list[Compilation] = [(self.model, request, "the step")]
        if self.model.info.features and not is_wide:
            compilations += self._parts_of(FLOAT32)
        return self._compile(compilations, program)[0]

    def split(self, cut: str) -> tuple[SerializedModel, SerializedModel]:
        """Return the model with its step on the host, and on nodes, up to `cut`. Raises InputError."""
        request = replace(self._step_of(self.model, self.public), cut=cut)
        (on_host,) = self._compile([(self.model, request, "the divided step")])
        if not on_host.compiled:
            return on_host, on_host
        directory, root = self._directory_of(request), self.space.project.root
        files = (store_file(directory / name, root, TrafficClass.MODEL) for name in OF_RANKS)
        return on_host, replace(on_host, compiled=tuple(files), template="")

    def parts(self, precision: str, *, is_wide: bool = False) -> tuple[SerializedModel, SerializedModel]:
        """Return the compiled frozen part and the head, whose samples are features of `precision`."""
        compilations = self._parts_of(precision, is_wide=is_wide)
        prefix, head = replace(self, say=lambda line: None)._compile(compilations)
        return prefix, head

    def forward(self, layer: str) -> SerializedModel:
        """Return the model with its compiled forward pass up to `layer`, or with why it is not compiled."""
        return self._compile([(self.model, self._forward_of(self.model, layer), "the model")])[0]

    def _step_of(self, model: SerializedModel, data: DatasetInfo, *, is_wide: bool = False) -> CompileRequest:
        form = replace(data.element_spec, path="", fingerprint="", num_samples=0)  # only shapes and types
        return CompileRequest(
            model.architecture.path,
            model.weights.path,
            model.info.recipe,
            data=replace(form, images_sha256="", labels_sha256=""),
            output="",
            code=model.user_code if model.info.needs_code else None,
            has_noise=self.job.noise is not None,
            has_validation=self.job.data.validation is not None,
            is_wide=is_wide and model.info.has_16_bits,
        )

    def _forward_of(self, model: SerializedModel, layer: str = "") -> CompileRequest:
        return CompileRequest(
            model.architecture.path,
            model.weights.path,
            Recipe(input_range=model.info.recipe.input_range),
            data=replace(NO_DATA, sample_shape=self.public.sample_shape, dtype=self.public.dtype),
            output="",
            code=model.user_code if model.info.needs_code else None,
            is_forward=True,
            layer=layer,
        )

    def _parts_of(self, precision: str, *, is_wide: bool = False) -> list[Compilation]:
        model = self.model
        assert model.info.features
        files, recipe = model.parts, replace(model.info.recipe, augment="")
        prefix = replace(model, architecture=files[0], weights=files[1], compiled=(), template="")
        head = replace(
            prefix, architecture=files[2], weights=files[3], info=replace(model.info, recipe=recipe)
        )
        shape = model.info.features.shape
        data = replace(self.public, sample_shape=shape, dtype=precision, max_values={})
        step = self._step_of(head, data, is_wide=is_wide)
        return [(prefix, self._forward_of(prefix), "the frozen part"), (head, step, "the step of the head")]

    def _compile(
        self, compilations: Sequence[Compilation], program: WorkerProgram | None = None
    ) -> list[SerializedModel]:
        directories = [self._directory_of(request) for _, request, _ in compilations]
        pairs = list(zip(compilations, directories, strict=True))
        missing = [(request, directory) for (_, request, _), directory in pairs if not load_intact(directory)]
        if missing:
            self.say("compiling the model")
            _compile_missing(missing, program or start_compiling(self.worker, self.space))
        elif program:
            program.close()
        return [self._with_files(model, what, directory) for (model, _, what), directory in pairs]

    def _directory_of(self, request: CompileRequest) -> Path:
        versions = [find_version(*names) for names in (TENSORFLOW, ("keras",), ("numpy",))]
        described = json.dumps([to_json(request), self.worker.sha256, *versions])
        return self.space.project.models / f"step-{hashlib.sha256(described.encode()).hexdigest()[:32]}"

    def _with_files(self, model: SerializedModel, what: str, directory: Path) -> SerializedModel:
        root, reason = self.space.project.root, load_kept(directory / REASON, str) or ""
        if reason:
            self.say(f"{what} runs with Python's TensorFlow: {reason}")
            return model
        files = (store_file(directory / name, root, TrafficClass.MODEL) for name in FILES)
        templates = [directory / name for name in TEMPLATES if (directory / name).exists()]
        template = str(templates[0].relative_to(root)) if templates else ""
        return replace(model, compiled=tuple(files), template=template)


def as_prefix(model: SerializedModel, precision: str = FLOAT32, *, has_views: bool = False) -> Prefix:
    """Return how machines are told of a model with a compiled forward pass, or of one without."""
    paths, compiled = (model.architecture.path, model.weights.path), model.step
    code = model.user_code if has_views or not compiled else None
    return Prefix(*paths, model.info.recipe.input_range, precision, code=code, compiled=compiled)


def files_of(model: SerializedModel, *, has_views: bool = False) -> list[StoredFile]:
    """Return the files that a machine needs for what `as_prefix` returns."""
    if not model.compiled:
        return model.files
    return [*model.compiled, *([model.code] if model.code and has_views else [])]


def _compile_missing(missing: Sequence[tuple[CompileRequest, Path]], compiler: WorkerProgram) -> None:
    with ExitStack() as stack:
        asides = [stack.enter_context(replacing_directory(directory)) for _, directory in missing]
        pairs = zip(missing, asides, strict=True)
        requests = tuple(replace(request, output=str(aside)) for (request, _), aside in pairs)
        compiled = compiler.call(CompileRequests(requests), Compiled)
        for (_, directory), aside, reason in zip(missing, asides, compiled.reasons, strict=True):
            save_text(aside / REASON, json.dumps(reason))
            seal(aside, directory.name)
