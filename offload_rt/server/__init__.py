"""An HTTP server over one `LLM`, for clients of OpenAI and Anthropic; needs the extra `server`.

Three rooms, which import downwards: the routes here, the protocols that clients speak (`protocols`), and the
thread that generates (`jobs`).
"""
