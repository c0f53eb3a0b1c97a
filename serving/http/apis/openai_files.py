"""OpenAI's Files and Batches API: `/v1/files` and `/v1/batches`, for batches of `/v1/embeddings`."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

from serving.bulk.batches_api.records import BatchesApiJob
from serving.bulk.batches_api.service import Upload
from serving.bulk.batches_api.store import INPUT_PURPOSE
from serving.errors import Forbidden, InvalidRequest, MalformedRequest, UnsupportedMediaType
from serving.fields.rule import Level
from serving.http.apis.openai_files_messages import (
    MAX_KEEP_S,
    MIN_KEEP_S,
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    batch_object,
    file_object,
)
from serving.http.exchange import OCTETS, HttpReply, JsonDecoder, json_reply
from serving.http.multipart import FileForm
from serving.http.routes import Docs, Router
from serving.security.keys import owner_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.bulk.batches_api.service import BatchesApiService
    from serving.http.app_context import AppContext
    from serving.http.exchange import HttpRequest

router = Router("OpenAI", of_core=True)

_WINDOW_S = 86_400
_MAX_FILES, _MAX_BATCHES, _USUAL_BATCHES = 10_000, 100, 20
_PURPOSE, _ANCHOR, _SECONDS = "purpose", "expires_after[anchor]", "expires_after[seconds]"
_UPLOADED = Level((_PURPOSE, _ANCHOR, _SECONDS), required=[_PURPOSE])
_MAX_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_GONE = {404: "This API key has no such file or batch."}
_FULL = {507: "The disk is full, or a limit on the number or size of files is reached."}
_BUSY = {409: "A batch is still reading the file."}
_ENDED = {409: "The batch has ended."}

_BATCH = JsonDecoder(BatchRequest)

_FILE_EXAMPLE = {
    "id": "file-0f0e2c9be1c94fd2a9d7b1a8f1f5a7c3",
    "bytes": 1482,
    "created_at": 1767225600,
    "filename": "texts.jsonl",
    "object": "file",
    "purpose": "batch",
    "status": "processed",
    "expires_at": 1769817600,
    "status_details": None,
}
_BATCH_EXAMPLE = {
    "id": "batch_2c8b52c5b0f24a27a2f0b4e2a7a3a9d1",
    "object": "batch",
    "endpoint": "/v1/embeddings",
    "input_file_id": _FILE_EXAMPLE["id"],
    "completion_window": "24h",
    "status": "in_progress",
    "created_at": 1767225600,
    "expires_at": 1767312000,
    "errors": None,
    "output_file_id": None,
    "error_file_id": None,
    "in_progress_at": 1767225601,
    "finalizing_at": None,
    "completed_at": None,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 10, "completed": 4, "failed": 0},
    "metadata": None,
}
_FORM = {
    "type": "object",
    "required": ["file", _PURPOSE],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        _PURPOSE: {"type": "string", "enum": [INPUT_PURPOSE]},
        _ANCHOR: {"type": "string", "enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": MIN_KEEP_S, "maximum": MAX_KEEP_S},
    },
}


def _offered(context: AppContext) -> bool:
    return context.settings.batch_dir is not None


def _page(example: Mapping[str, Any]) -> dict[str, Any]:
    ends = {"first_id": example["id"], "last_id": example["id"]}
    return {"object": "list", "data": [example], **ends, "has_more": False}


@router.upload("/v1/files", Docs(gives=FileObject, form=_FORM, reply=_FILE_EXAMPLE, statuses=_FULL, offered=_offered))
async def create_file(context: AppContext, http: HttpRequest) -> HttpReply:
    """Upload a JSONL file of requests for a batch."""
    jobs = _jobs(context)
    if context.keys is None and _is_foreign_page(context, http):
        raise Forbidden("this origin may not upload files; allow it with --cors-origins")
    if b"content-encoding" in http.headers:
        raise UnsupportedMediaType("Content-Encoding is not supported for uploads; send the file uncompressed")
    if http.stream is None:
        raise MalformedRequest("the request has no body")
    async with Upload(jobs) as upload:
        form = FileForm(http.headers.get(b"content-type", b""), "file", upload.write)
        while data := await http.stream.read():
            await jobs.in_thread(form.feed, data)
        form.finish()
        if form.file_name is None:
            raise InvalidRequest("the form has no field `file`")
        if (ignored := _UPLOADED.passed_over(form.fields)) is not None:
            http.pass_over(ignored)
        keep_s = _kept_s(form.fields)
        return json_reply(file_object(await upload.accept(_owner(context, http), form.file_name, keep_s)))


@router.get(
    "/v1/files",
    Docs(
        gives=FileList,
        reply=_page(_FILE_EXAMPLE),
        statuses=_GONE,
        takes_query={
            "purpose": "Purpose of the files: `batch` or `batch_output`.",
            "limit": f"Maximum files to return: 1 to {_MAX_FILES} (default: {_MAX_FILES}).",
            "order": "Order by creation time: `asc` or `desc` (default: `desc`).",
            "after": "ID of a file: return the files after it.",
        },
        offered=_offered,
    ),
)
async def list_files(context: AppContext, http: HttpRequest) -> HttpReply:
    """List the files of this API key."""
    jobs, query = _jobs(context), _query(http)
    limit = _limit(query, _MAX_FILES, _MAX_FILES)
    order, owner = query.get("order", "desc"), _owner(context, http)
    if order not in {"asc", "desc"}:
        raise InvalidRequest("`order` must be `asc` or `desc`")
    files, more = await jobs.run(
        lambda store: store.list_files(
            owner, after=query.get("after"), limit=limit, ascending=order == "asc", purpose=query.get(_PURPOSE)
        )
    )
    data = [file_object(file) for file in files]
    return json_reply(FileList("list", data, data[0].id if data else None, data[-1].id if data else None, more))


@router.get("/v1/files/{file_id}", Docs(gives=FileObject, reply=_FILE_EXAMPLE, statuses=_GONE, offered=_offered))
async def retrieve_file(context: AppContext, http: HttpRequest) -> HttpReply:
    """Get a file's metadata."""
    owner, file_id = _owner(context, http), http.parameters["file_id"]
    return json_reply(file_object(await _jobs(context).run(lambda store: store.file(owner, file_id))))


@router.get("/v1/files/{file_id}/content", Docs(gives_file=True, statuses=_GONE, offered=_offered))
async def file_content(context: AppContext, http: HttpRequest) -> HttpReply:
    """Download a file."""
    jobs, owner, file_id = _jobs(context), _owner(context, http), http.parameters["file_id"]
    file = await jobs.run(lambda store: store.file(owner, file_id))
    # A browser must not show a client's upload as a page of this server.
    name = quote(file.name or file.id).encode()
    head = b"content-disposition: attachment; filename*=utf-8''%b\r\nx-content-type-options: nosniff\r\n" % name
    return HttpReply(b"", content_type=OCTETS, head=head, file=jobs.store.path(file.id))


@router.delete(
    "/v1/files/{file_id}",
    Docs(
        gives=DeletedFile,
        reply={"id": _FILE_EXAMPLE["id"], "object": "file", "deleted": True},
        statuses=_GONE | _BUSY,
        offered=_offered,
    ),
)
async def delete_file(context: AppContext, http: HttpRequest) -> HttpReply:
    """Delete a file."""
    owner, file_id = _owner(context, http), http.parameters["file_id"]
    await _jobs(context).run(lambda store: store.delete_file(owner, file_id))
    return json_reply(DeletedFile(file_id, "file", deleted=True))


@router.post(
    "/v1/batches",
    Docs(
        takes=BatchRequest,
        gives=BatchObject,
        example={
            "input_file_id": _FILE_EXAMPLE["id"],
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        },
        reply=_BATCH_EXAMPLE,
        statuses=_GONE | {429: "Too many batches are unfinished (--batch-max-jobs).", 507: "The disk is full."},
        offered=_offered,
    ),
)
async def create_batch(context: AppContext, http: HttpRequest) -> HttpReply:
    """Create a batch from a file of requests."""
    jobs = _jobs(context)
    message = await http.json(_BATCH, context.large_body_lock)
    pairs = message.metadata or {}
    if len(pairs) > _MAX_PAIRS or any(
        len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE for key, value in pairs.items()
    ):
        raise InvalidRequest(
            f"`metadata` may have {_MAX_PAIRS} pairs, with keys of up to {_LONGEST_KEY} characters and values of up to"
            f" {_LONGEST_VALUE}"
        )
    now = int(time.time())
    job = BatchesApiJob(
        id=f"batch_{secrets.token_hex(16)}",
        owner=_owner(context, http),
        endpoint=message.endpoint,
        input_file_id=message.input_file_id,
        completion_window=message.completion_window,
        created_at=now,
        expires_at=now + _WINDOW_S,
        metadata=message.metadata,
        keep_output_s=message.output_expires_after.seconds if message.output_expires_after else None,
    )
    return json_reply(batch_object(await jobs.create(job)))


@router.get(
    "/v1/batches",
    Docs(
        gives=BatchList,
        reply=_page(_BATCH_EXAMPLE),
        statuses=_GONE,
        takes_query={
            "limit": f"Maximum batches to return: 1 to {_MAX_BATCHES} (default: {_USUAL_BATCHES}).",
            "after": "ID of a batch: return the batches created before it.",
        },
        offered=_offered,
    ),
)
async def list_batches(context: AppContext, http: HttpRequest) -> HttpReply:
    """List the batches of this API key, newest first."""
    query, owner = _query(http), _owner(context, http)
    limit = _limit(query, _USUAL_BATCHES, _MAX_BATCHES)
    found, more = await _jobs(context).run(lambda store: store.list_jobs(owner, after=query.get("after"), limit=limit))
    data = [batch_object(job) for job in found]
    return json_reply(BatchList("list", data, data[0].id if data else None, data[-1].id if data else None, more))


@router.get("/v1/batches/{batch_id}", Docs(gives=BatchObject, reply=_BATCH_EXAMPLE, statuses=_GONE, offered=_offered))
async def retrieve_batch(context: AppContext, http: HttpRequest) -> HttpReply:
    """Get a batch and its progress."""
    owner, batch_id = _owner(context, http), http.parameters["batch_id"]
    return json_reply(batch_object(await _jobs(context).run(lambda store: store.job(owner, batch_id))))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    Docs(gives=BatchObject, reply=_BATCH_EXAMPLE, statuses=_GONE | _ENDED, offered=_offered),
)
async def cancel_batch(context: AppContext, http: HttpRequest) -> HttpReply:
    """Cancel a batch and keep its results so far."""
    return json_reply(batch_object(await _jobs(context).cancel(_owner(context, http), http.parameters["batch_id"])))


def _jobs(context: AppContext) -> BatchesApiService:
    if context.jobs is None:
        raise Forbidden("files and batches are off; start the server with --batch-dir")
    return context.jobs


def _is_foreign_page(context: AppContext, http: HttpRequest) -> bool:
    """Whether a page of another origin sends a form, for which browsers send no preflight."""
    origin = http.headers.get(b"origin")
    if origin is None or context.settings.allowed_origins.allow(origin):
        return False
    # The host may differ behind a proxy, and browsers send no Sec-Fetch-Site without TLS.
    same_host = origin.partition(b"://")[2] == http.headers.get(b"host")
    return not same_host and http.headers.get(b"sec-fetch-site") != b"same-origin"


def _owner(context: AppContext, http: HttpRequest) -> str:
    return "" if context.keys is None else owner_of(http.header(b"authorization"))


def _kept_s(form: Mapping[str, str]) -> int | None:
    """The retention time that a form sets, in seconds. Raises `InvalidRequest` if a field is wrong."""
    if form.get(_PURPOSE) != INPUT_PURPOSE:
        raise InvalidRequest(f"the field `{_PURPOSE}` must be `{INPUT_PURPOSE}`")
    if _ANCHOR not in form and _SECONDS not in form:
        return None
    seconds = form.get(_SECONDS, "")
    if form.get(_ANCHOR) != "created_at" or not (
        seconds.isascii() and seconds.isdigit() and MIN_KEEP_S <= int(seconds[:10]) <= MAX_KEEP_S
    ):
        raise InvalidRequest(
            f"`expires_after` must have the `anchor` created_at and {MIN_KEEP_S} to {MAX_KEEP_S} `seconds`"
        )
    return int(seconds)


def _query(http: HttpRequest) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(http.query.decode("latin-1")).items()}


def _limit(query: Mapping[str, str], usual: int, most: int) -> int:
    value = query.get("limit", str(usual))
    if not (value.isascii() and value.isdigit() and 1 <= int(value[:10]) <= most):
        raise InvalidRequest(f"`limit` must be 1 to {most}")
    return int(value)
