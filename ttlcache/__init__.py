"""Keep the KV cache of LLM agents in GPU memory between their turns.

The engine-agnostic core: it decides, counts and orders; it never imports an
engine. `ttlcache_connector` is the adapter to vLLM. Its words:

program     an agent's whole job, many requests; a turn is one of them that ended.
gap         from a turn's end to the program's next request: the tool runs.
pin         references on a finished turn's KV blocks, until a deadline (now + TTL).
claim       the next request got its blocks, the pinned ones among them: the pin ends.
            A claimant is a request that waits to do so.
evict       a pin ends, or loses its tail, because a request lacks memory; once out of
            GPU memory, KV is demoted (copied to a lower tier) and reloaded.
newcomer    a program of which no request was admitted yet; admission may hold it back.
place       of a context in the waiting queue: a number, smaller is served first; new
            after each quantum of service. From it an ordering makes the queue's key
            (`priority`), and the rank: whose pins a waiting request may take.
tenant      a `cache_salt`: shares blocks with no other.
"""
