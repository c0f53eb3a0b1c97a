"""Texts in files, answers in files: the Batches API of a server, and jobs on Ray without one."""
