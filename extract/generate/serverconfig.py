"""Which server generates, and how it is asked."""

import dataclasses
from typing import Literal, get_args

from extract.generate.spending import Prices

Dialect = Literal["vllm", "openai"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Which server, and how it is asked.

    Attributes:
      url: up to and including `/v1`.
      model: the name the server gives its model.
      revision: what identifies the weights behind that name. No server tells, so who
        runs it has to; it is part of every key.
      dialect: "vllm" sends and receives exact token ids, and knows top_k; "openai"
        keeps to the fields that every such server has.
      log_probs: ask for log-probabilities.
      enable_thinking: handed to the chat template, "vllm" only: the protocol has no
        field for it, so another server's model thinks or not as it was set up.
      dtype: of the server's weights; no server tells.
      tokenizer: SHA-256 of the model's tokenizer, where it is known here.
      chat_template: likewise.
      n_concurrent: most requests under way at a time.
      n_retries: of one request.
      timeout: of one request, seconds.
      prices: for the spending cap.
    """

    url: str
    model: str
    revision: str = "unstated"
    dialect: Dialect = "vllm"
    log_probs: bool = False
    enable_thinking: bool = False
    dtype: str = "unstated"
    tokenizer: str | None = None
    chat_template: str | None = None
    n_concurrent: int = 16
    n_retries: int = 5
    timeout: float = 600.0
    prices: Prices = Prices()

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
          ValueError: a value is out of its range.
        """
        if self.dialect not in get_args(Dialect):
            raise ValueError(
                f"dialect: expected one of {', '.join(get_args(Dialect))}, "
                f"found {self.dialect!r}"
            )
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"server: expected a URL such as http://localhost:8000/v1, "
                f"found {self.url!r}"
            )
        if self.n_concurrent < 1 or self.n_retries < 0 or not self.timeout > 0:
            raise ValueError(
                "server: expected at least 1 request at a time, 0 or more retries and "
                f"a positive time-out, found {self.n_concurrent}, {self.n_retries} "
                f"and {self.timeout:g}"
            )
