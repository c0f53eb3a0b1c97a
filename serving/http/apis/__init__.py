"""The HTTP APIs, one module each; `NAME_messages.py` holds the request and reply types of its routes.

- `tei`: text-embeddings-inference (`/embed`, `/rerank`, `/predict`, ...)
- `openai`: `/v1/embeddings`, `/v1/models`
- `cohere`: `/v1/embed`, `/v1/rerank`, and the same below `/v2`; the rerank APIs of Jina and vLLM
- `huggingface`: the inference API (`/classify`, `/answer`, `/tag`, `/fill-mask`)
- `oip`: the Open Inference Protocol, `/v2/...`
- `operations`: probes, `/metrics`, `/status`
- `console_page`: the console
"""
