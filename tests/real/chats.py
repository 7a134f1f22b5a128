"""Questions for a chat model: ten that it is asked, and others, of other things, from which a draft may learn."""

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about autumn leaves.",
    "I have eggs, rice and soy sauce. What can I cook in twenty minutes?",
    "Write a Python function that returns the larger of two numbers.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite e-mail to my landlord. The heating has not worked since Monday.",
    "List three tips for a first marathon.",
    "Translate into French: good morning, how are you?",
    "Summarise in one sentence: The meeting was moved to Friday because the room is taken on Thursday.",
)
THINGS = (
    *("gravity", "a bicycle", "the Roman Empire", "photosynthesis", "a cup of tea", "learning to swim", "the moon"),
    *("a small garden", "honey bees", "saving money", "a good night's sleep", "volcanoes", "a job interview", "chess"),
    *("the French Revolution", "electric cars", "baking bread", "climate change", "a lighthouse", "whales", "coffee"),
    *("time management", "the human heart", "rivers", "a lost dog", "public speaking", "stars", "recycling", "snow"),
    *("the printing press", "democracy", "music", "a railway journey", "penguins", "databases", "friendship"),
)
ASKED = (
    "Explain {} in simple terms.",
    "Write a short story about {}.",
    "Give me five facts about {}.",
    "What is the history of {}?",
    "Why is {} important?",
    "List the advantages and disadvantages of {}.",
    "Write an e-mail to a friend about {}.",
    "How would you describe {} to a child?",
)


def questions_to_learn_from() -> list[str]:
    """Each thing is asked about in each way, and neighbours differ in both."""
    pairs = (
        (thing, ASKED[(turn + index) % len(ASKED)]) for turn in range(len(ASKED)) for index, thing in enumerate(THINGS)
    )
    return [asked.format(thing) for thing, asked in pairs]
