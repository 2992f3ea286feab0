"""A chat that shows text as it comes, stops at given texts and remembers the conversation.

Each line of stdin is a message:

    python examples/02_streaming_chat.py smollm2.edge --stop '!'
"""

from __future__ import annotations

import argparse
import sys

from edgekit import LLM, EdgeKitError, SamplingParams


def main() -> None:
    """Reads the command line, then one message per line."""
    parser = argparse.ArgumentParser(description="Chat with a bundle.")
    parser.add_argument("bundle", help="directory that edgekit export made")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end answers here; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    arguments = parser.parse_args()

    llm = LLM(arguments.bundle)
    params = SamplingParams(max_tokens=arguments.max_tokens, stop=tuple(arguments.stop))
    # A session keeps the tokens that it has read: each turn computes the new message only.
    session = llm.new_session()
    messages: list[dict[str, str]] = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        pieces = []
        for chunk in llm.stream_chat(messages, params, session=session):
            print(chunk.text, end="", flush=True)
            pieces.append(chunk.text)
            if chunk.output is not None:
                usage = chunk.output.usage
                print(f"\n[{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were in the cache]", flush=True)
        messages.append({"role": "assistant", "content": "".join(pieces)})


if __name__ == "__main__":
    try:
        main()
    except EdgeKitError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
