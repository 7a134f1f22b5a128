"""The clients that the tier `clients` installs, by the names that their registries have for them."""

VERSIONS = {
    "openai for Node": "7.57.0",
    "@anthropic-ai/sdk": "1.14.0",
    "langchain-openai": "1.7.4",
    "langchain-anthropic": "1.7.10",
    "litellm": "1.110.2",
    "instructor": "1.17.0",
    "llm": "0.36",
    "lm_eval": "0.4.13",
    "guidellm": "0.8.1",
}


def requirements(*names: str) -> list[str]:
    return [f"{name}=={VERSIONS[name.partition('[')[0]]}" for name in names]
