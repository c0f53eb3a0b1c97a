"""The text model of a bundle for Triton's Python backend: texts in, the task's answer out.

`export.triton.repository` copies this file into a Triton model repository as `model.py`, where it runs without the rest
of the project. It needs numpy and tokenizers, and onnxruntime if it runs the ONNX file itself. Beside it are
`tokenizer.json`, and `model.json` with data from the bundle's manifest. The operator's settings are under `parameters`
in `config.pbtxt`:

    engine     the engine model that answers, one of those listed in `model.json`
    execution  `bls`: Triton runs the engine model; `onnxruntime`: this process runs its ONNX file, for a
               Triton without an ONNX Runtime backend. There is no fallback from one to the other.
    truncate   whether long texts are truncated or rejected; a request parameter overrides it
    threads    for `onnxruntime`; 0 means one for each core
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import triton_python_backend_utils as triton
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from tokenizers import Encoding

    Tensors = dict[str, NDArray[Any]]

_CHARACTERS_PER_TOKEN = 32
"""Characters for each token of the model's maximum; longer texts are rejected unless truncation is allowed."""

_MAX_CHARACTERS = 262_144
"""Maximum characters read of a truncated text: about 0.2 s of work."""

_SMALLEST_NORM = 1e-12


class _Engine(Protocol):
    async def run(self, tensors: Tensors) -> Tensors: ...


class _BlsEngine:
    """An engine model of this Triton, called by business logic scripting (BLS)."""

    def __init__(self, name: str, version: int, outputs: list[str]) -> None:
        self._name = name
        self._version = version
        self._outputs = outputs

    async def run(self, tensors: Tensors) -> Tensors:
        request = triton.InferenceRequest(
            model_name=self._name,
            model_version=self._version,
            requested_output_names=self._outputs,
            inputs=[triton.Tensor(name, array) for name, array in tensors.items()],
            preferred_memory=triton.PreferredMemory(triton.TRITONSERVER_MEMORY_CPU, 0),
        )
        response = await request.async_exec()
        if response.has_error():
            raise _Failed(f"engine model {self._name}: {response.error().message()}")
        return {name: triton.get_output_tensor_by_name(response, name).as_numpy() for name in self._outputs}


class _OrtEngine:
    """An engine model's ONNX file, run by ONNX Runtime in this process."""

    def __init__(self, path: Path, threads: int, outputs: list[str]) -> None:
        # Disables ONNX Runtime's telemetry, which starts at import.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime  # noqa: PLC0415  not needed where Triton runs the engine

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = False  # every length is a new shape: memory patterns would only accumulate
        if _saturates():
            options.add_session_config_entry("session.x64quantprecision", "1")
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._outputs = outputs

    async def run(self, tensors: Tensors) -> Tensors:
        return dict(zip(self._outputs, self._session.run(self._outputs, tensors), strict=True))


def _saturates(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the usual 8-bit instructions may saturate on this processor: x86 without VNNI."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return False
    return not re.search(r"^flags\b.*\b(avx512_vnni|avx_vnni)\b", cpuinfo.read_text(errors="replace"), re.MULTILINE)


class TritonPythonModel:
    """The class that the Python backend looks for in `model.py`."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the parameters and the files beside this one; an error keeps the model from becoming ready."""
        repository, version = Path(args["model_repository"]), args["model_version"]
        folder = repository / version
        self._model = json.loads((folder / "model.json").read_bytes())
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        parameters = json.loads(args["model_config"])["parameters"]
        chosen = {name: value["string_value"] for name, value in parameters.items()}
        self._truncate = chosen["truncate"] == "true"
        name = chosen["engine"]
        if name not in self._model["engines"]:
            raise triton.TritonModelException(f"unknown engine {name!r}; engines: {', '.join(self._model['engines'])}")
        self._limits = self._model["engines"][name]
        self._engine: _Engine
        match chosen["execution"]:
            case "bls" if self._limits["adds_8_bit_products"] and _saturates():
                # Triton's ONNX Runtime backend cannot pass the option for exact products.
                raise triton.TritonModelException(
                    f"engine {name} is not verified on this processor, which has no VNNI. Set the parameter execution"
                    " to onnxruntime, or engine to one in fp32"
                )
            case "bls":
                self._engine = _BlsEngine(name, int(version), self._model["outputs"])
            case "onnxruntime" if self._limits["file"] == "model.onnx":
                path = repository.parent / name / version / "model.onnx"
                self._engine = _OrtEngine(path, int(chosen["threads"]), self._model["outputs"])
            case other:
                raise triton.TritonModelException(f"engine {name} cannot be run by {other!r}")

    async def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request with the rows of its texts, or with its own error."""
        encoded = [self._encoded(request) for request in requests]
        rows = iter(await self._rows([text for texts in encoded if isinstance(texts, list) for text in texts]))
        answers = [texts if isinstance(texts, _Refused) else [next(rows) for _ in texts] for texts in encoded]
        return [_response(rows, normalize=self._model["normalize"]) for rows in answers]

    def _encoded(self, request: Any) -> list[Encoding] | _Refused:  # noqa: ANN401  the backend's own type
        try:
            cut = self._may_cut(request.parameters())
            texts = self._texts(triton.get_input_tensor_by_name(request, "text").as_numpy(), cut=cut)
            encodings = self._tokenizer.encode_batch_fast(texts)
            return [self._fitted(*entry, cut=cut) for entry in zip(range(len(texts)), texts, encodings, strict=True)]
        except _Refused as refused:
            return refused

    def _may_cut(self, parameters: str) -> bool:
        chosen = json.loads(parameters or "{}").get("truncate", self._truncate)
        if not isinstance(chosen, bool):
            raise _Refused("the parameter `truncate` must be true or false")
        return chosen

    def _texts(self, values: NDArray[np.object_], *, cut: bool) -> list[str]:
        most = _CHARACTERS_PER_TOKEN * self._model["max_length"]
        read = max(most, _MAX_CHARACTERS)
        # The same truncation as in the server if a request names no end.
        part = slice(-read, None) if self._model["truncation_side"] == "left" else slice(read)
        texts = []
        for index, value in enumerate(values.ravel()):
            try:
                text = self._model["prompt"] + value.decode("utf-8")
            except UnicodeDecodeError:
                raise _Refused("input 'text' contains bytes that are not UTF-8") from None
            if not cut and len(text) > most:
                raise _Refused(
                    f"input {index} has {len(text)} characters; at most {most} are read: shorten it or allow truncation"
                )
            texts.append(text[part])
        return texts

    def _fitted(self, index: int, text: str, encoding: Encoding, *, cut: bool) -> Encoding:
        longest = self._model["max_length"]
        surplus = len(encoding) - longest
        if surplus <= 0:
            return encoding
        if not cut:
            raise _Refused(
                f"input {index} has {len(encoding)} tokens; the model takes {longest}: shorten it or allow truncation"
            )
        inner = self._tokenizer.encode(text, add_special_tokens=False)
        inner.truncate(len(inner) - surplus, direction=self._model["truncation_side"])
        return self._tokenizer.post_process(inner)

    async def _rows(self, encodings: list[Encoding]) -> list[Tensors | _Refused]:
        """The graph's outputs for each text, whatever its batch."""
        rows: list[Tensors | _Refused] = [_Failed("not computed")] * len(encodings)
        chunks = list(self._chunks([len(encoding) for encoding in encodings]))
        answers = await asyncio.gather(*[self._run([encodings[at] for at in indices]) for indices in chunks])
        for indices, outputs in zip(chunks, answers, strict=True):
            for row, index in enumerate(indices):
                rows[index] = outputs if isinstance(outputs, _Refused) else _row(outputs, row)
        return rows

    def _chunks(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Groups texts of similar length into batches, to limit padding."""
        bounds: list[int] = self._limits["lengths"]
        most = self._limits["max_batch_size"]
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            groups.setdefault(min(bound for bound in bounds if bound >= length), []).append(index)
        for indices in groups.values():
            yield from (indices[at : at + most] for at in range(0, len(indices), most))

    async def _run(self, encodings: Sequence[Encoding]) -> Tensors | _Refused:
        try:
            return await self._engine.run(self._tensors(encodings))
        except _Refused as refused:
            return refused

    def _tensors(self, encodings: Sequence[Encoding]) -> Tensors:
        """The graph's inputs, int32 [texts, tokens], padded to a batch size that has a CUDA graph."""
        count, longest = len(encodings), max(len(encoding) for encoding in encodings)
        if self._limits["fixed_lengths"]:
            longest = min(bound for bound in self._limits["lengths"] if bound >= longest)
        rows = min((size for size in self._limits["batch_sizes"] if size >= count), default=count)
        ids = np.full((rows, longest), self._model["pad_id"], np.int32)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        mask[count:, 0] = 1  # the mean of a row without tokens is undefined
        for row, encoding in enumerate(encodings):
            ids[row, : len(encoding)] = encoding.ids
            mask[row, : len(encoding)] = 1
            types[row, : len(encoding)] = encoding.type_ids
        tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return {name: tensors[name] for name in self._model["inputs"]}


class _Refused(Exception):
    """The request is invalid; the message is the client's error."""


class _Failed(_Refused):
    """An error on the server's side."""


def _response(rows: _Refused | list[Tensors | _Refused], *, normalize: bool) -> Any:  # noqa: ANN401  the backend's own type
    try:
        outputs = _embedding(rows, normalize=normalize)
    except _Refused as refused:
        code = triton.TritonError.INTERNAL if isinstance(refused, _Failed) else triton.TritonError.INVALID_ARG
        return triton.InferenceResponse(error=triton.TritonError(str(refused), code))
    return triton.InferenceResponse([triton.Tensor(name, array) for name, array in outputs.items()])


def _embedding(rows: _Refused | list[Tensors | _Refused], *, normalize: bool) -> Tensors:
    """The task embed: `embedding` float32 [texts, dimensions], L2-normalized if the model's folder says so.

    Raises:
        _Refused: The request, or one of its texts, has no answer.
    """
    pooled = np.stack([row["pooled"] for row in _computed(rows)])
    if not np.isfinite(pooled).all():
        raise _Failed("the model's answer is not finite")
    if not normalize:
        return {"embedding": pooled}
    norms = np.sqrt(np.einsum("ij,ij->i", pooled, pooled))[:, None]
    return {"embedding": pooled / np.maximum(norms, _SMALLEST_NORM)}


def _computed(rows: _Refused | list[Tensors | _Refused]) -> Iterator[Tensors]:
    for row in [rows] if isinstance(rows, _Refused) else rows:
        if isinstance(row, _Refused):
            raise row
        yield row


def _row(outputs: Tensors, row: int) -> Tensors:
    return {name: array[row] for name, array in outputs.items()}
