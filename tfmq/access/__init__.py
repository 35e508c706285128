"""Who may do what: users with passwords (SCRAM), their rights and their quotas. No I/O except the file of users."""
