"""Run handlers: threads, asyncio and Twisted runners, retries, dead letters."""
