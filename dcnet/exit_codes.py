"""Exit codes of `dcnet`."""

FAILED = 1
# Wrong options, or an input that cannot be used; stderr has one sentence about it.
BAD_INPUT = 2
# 128 + SIGINT.
INTERRUPTED = 130
# 128 + SIGPIPE: the reader of the output closed it.
OUTPUT_CLOSED = 141
