"""HTTP/1.1 by a protocol of our own on httptools, and one router per protocol."""
