"""`python -m ttlcache.cli …` where the console script is not installed."""

from ttlcache.cli.main import app

app(prog_name="ttlcache")
