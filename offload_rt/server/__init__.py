"""An OpenAI-compatible HTTP server over one `LLM`; needs the extra `server` (FastAPI and uvicorn)."""
