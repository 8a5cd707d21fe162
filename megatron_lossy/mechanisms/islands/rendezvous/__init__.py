"""Launches that come and go find each other at an existing service, torchft's lighthouse (docs/elastic.md).

All processes that ask get the same answer: the messages of those that are alive.
"""
