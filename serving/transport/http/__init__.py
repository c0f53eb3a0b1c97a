"""HTTP/1.1 by uvicorn's protocol with limits, and one router per protocol."""
