"""Hours of agents against a real server, watched for leaks and drift."""
