"""Administration of a broker: topics, groups, delayed messages, schedules, transactions."""
