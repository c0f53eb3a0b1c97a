"""A plain application: FastAPI, a tokenizer and ONNX Runtime in one process.

    ARTIFACT=model.int8.onnx TOKENIZER=tokenizer.json THREADS=2 uvicorn fastapi_app:app

It runs in an environment of its own, without this project. `/embed` computes in the event loop; `/embed-threads`
computes in FastAPI's thread pool for plain functions, on single-threaded sessions.
"""

from __future__ import annotations

import os
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from fastapi import FastAPI
from fastapi.responses import Response
from orjson import OPT_SERIALIZE_NUMPY, dumps
from pydantic import BaseModel
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THREADS = int(os.environ["THREADS"])
_TOKENIZER = Tokenizer.from_file(os.environ["TOKENIZER"])


class Ask(BaseModel):
    inputs: str


def _session(threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(os.environ["ARTIFACT"], options, providers=["CPUExecutionProvider"])


def _embedding(session: onnxruntime.InferenceSession, text: str) -> Response:
    ids = np.array([_TOKENIZER.encode(text).ids], np.int32)
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    pooled: NDArray[Any] = session.run(None, {entry.name: known[entry.name] for entry in session.get_inputs()})[0]
    vectors = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    return Response(dumps(vectors, option=OPT_SERIALIZE_NUMPY), media_type="application/json")


app = FastAPI()
_wide = _session(_THREADS)
_narrow: SimpleQueue[onnxruntime.InferenceSession] = SimpleQueue()
for _ in range(_THREADS):
    _narrow.put(_session(1))


@app.get("/ready")
async def ready() -> str:
    """Answers once everything is loaded."""
    return "yes"


@app.post("/embed")
async def embed(ask: Ask) -> Response:
    """One text after the other, on all cores."""
    return _embedding(_wide, ask.inputs)


@app.post("/embed-threads")
def embed_threads(ask: Ask) -> Response:
    """As many texts at a time as there are cores."""
    session = _narrow.get()
    try:
        return _embedding(session, ask.inputs)
    finally:
        _narrow.put(session)
