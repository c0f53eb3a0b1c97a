"""Sentence Transformers' `SparseEncoder` with its ONNX backend, behind FastAPI.

    FOLDER=model FILE=onnx/model.onnx BATCH=8 uvicorn sparse_encoder_app:app --workers 2

It runs in an environment of its own, without this project. Each worker has a single-threaded encoder, which takes the
texts that wait in its process, up to BATCH together.
"""

from __future__ import annotations

import asyncio
import os
import threading
from queue import SimpleQueue

import onnxruntime
import torch
from fastapi import FastAPI
from fastapi.responses import Response
from orjson import dumps
from pydantic import BaseModel
from sentence_transformers import SparseEncoder

_BATCH = int(os.environ["BATCH"])


class Ask(BaseModel):
    inputs: str


def _encoder() -> SparseEncoder:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    torch.set_num_threads(1)
    settings = {"file_name": os.environ["FILE"], "provider": "CPUExecutionProvider", "session_options": options}
    return SparseEncoder(os.environ["FOLDER"], backend="onnx", device="cpu", model_kwargs=settings)


def _rows(texts: list[str]) -> list[bytes]:
    found = []
    for vector in _ENCODER.encode(texts, batch_size=_BATCH, show_progress_bar=False, convert_to_sparse_tensor=False):
        (indices,) = vector.nonzero(as_tuple=True)
        weights = zip(indices.tolist(), vector[indices].tolist(), strict=True)
        found.append(dumps([[{"index": index, "value": value} for index, value in weights]]))
    return found


def _work() -> None:
    while True:
        batch = [_WAITING.get()]
        while len(batch) < _BATCH and not _WAITING.empty():
            batch.append(_WAITING.get())
        for (_, future), row in zip(batch, _rows([text for text, _ in batch]), strict=True):
            future.get_loop().call_soon_threadsafe(future.set_result, row)


app = FastAPI()
_ENCODER = _encoder()
_WAITING: SimpleQueue[tuple[str, asyncio.Future[bytes]]] = SimpleQueue()
threading.Thread(target=_work, daemon=True).start()


@app.get("/ready")
async def ready() -> str:
    """Answers once everything is loaded."""
    return "yes"


@app.post("/embed_sparse")
async def embed_sparse(ask: Ask) -> Response:
    """One text, in the format of text-embeddings-inference."""
    future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    _WAITING.put((ask.inputs, future))
    return Response(await future, media_type="application/json")
