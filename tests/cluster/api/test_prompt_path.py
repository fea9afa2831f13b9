# Modules: cluster.api.openai.generation, cluster.api.grpc.servicers
"""The files that a reader opens to follow a prompt from either API to the scheduler's queue."""

import sys
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path

import grpc
from google.protobuf.message import Message
from pydantic import BaseModel

from cluster.api.http.bodies import ApiRequest
from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceStub
from specdec.text.tokenizer import Tokenizer
from tests.cluster.ingress import running_ingress

ROOT = Path(__file__).parents[3]
PROMPT = "the lighthouse keeper"
MAX_FILES = 18


class PromptPath:
    """Files whose functions get or return the prompt, as text, as bytes or as token ids."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._forms = {PROMPT: str, PROMPT.encode(): bytes, tuple(token_ids): tuple}
        self._is_recording = False
        self.files = set()

    @contextmanager
    def recorded(self, engine_thread):
        """Record on this thread and the engine's, until the scheduler has the prompt."""
        engine_thread.post(lambda: sys.setprofile(self._profile))
        self.files, self._is_recording = set(), True
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            engine_thread.post(lambda: sys.setprofile(None))

    def _profile(self, frame, event, result):
        code = frame.f_code
        if not self._is_recording or event not in ("call", "return") or not _is_ours(code):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in (*names, *code.co_freevars)]
        if self._holds(values) or (event == "return" and self._holds(result)):
            self.files.add(str(Path(code.co_filename).relative_to(ROOT)))
        if code.co_qualname == "Scheduler.add":
            self._is_recording = False

    def _holds(self, value, depth=5):
        for form, kind in self._forms.items():
            if isinstance(value, kind) and (form in value if kind is not tuple else form == value):
                return True
        return depth > 0 and any(self._holds(each, depth - 1) for each in _parts(value))


def _is_ours(code):
    path = Path(code.co_filename)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("cluster", "specdec")


def _parts(value):
    """Return the values in a container, a message or a record; none in a service's objects."""
    if isinstance(value, Message):
        return [each for _, each in value.ListFields()]
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value[:50]
    if is_dataclass(value) and not hasattr(value, "__dict__"):  # it has slots
        return [getattr(value, each.name, None) for each in fields(value)]
    is_record = is_dataclass(value) or isinstance(value, BaseModel | ApiRequest)
    return vars(value).values() if is_record else ()


def assert_few(files, first):
    assert {first, "specdec/engine/scheduling/scheduler.py"} <= files
    assert len(files) <= MAX_FILES, sorted(files)


async def test_a_prompt_passes_through_few_files(tiny_model_dir, tmp_path):
    path = PromptPath(Tokenizer(tiny_model_dir).encode(PROMPT))
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "stream": True}
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=2))
    async with running_ingress(tiny_model_dir, tmp_path) as served:
        thread = served.replica.router.running_engine().thread
        with path.recorded(thread):
            response = await served.replica.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert_few(path.files, "cluster/api/http/bodies.py")
        async with grpc.aio.insecure_channel(served.grpc_address) as channel:
            with path.recorded(thread):
                chunks = InferenceServiceStub(channel).GenerateStream(request)
                assert [each async for each in chunks]
        assert_few(path.files, "cluster/api/grpc/intake.py")
