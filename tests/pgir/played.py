"""A controller played by hand: its calls are answered by a function."""

from beatrice.pgir.controllers.plans import Reply


def played(plan, serve):
    """Return what a plan returns, and the calls it made."""
    calls, value = [], None
    while True:
        try:
            call = plan.send(value)
        except StopIteration as end:
            return end.value, calls
        calls.append(call)
        value = serve(call)


def reply(text, log_prob=-0.5, n_prompt=10):
    """An answer of one token and its stop token."""
    return Reply(
        text=text,
        token_ids=(7,),
        stop_id=2,
        log_probs=(log_prob, log_prob),
        n_prompt_tokens=n_prompt,
        n_shown=0,
    )
