"""Random prompts of two domains that the shipped heads were not trained on: SQL and German."""

from specdec.types.request import ChatMessage

TABLES = {
    "customers": ["name", "city", "country", "email", "signup_date"],
    "orders": ["customer_id", "order_date", "total", "status"],
    "products": ["name", "category", "price", "stock"],
    "employees": ["name", "department_id", "salary", "hire_date"],
    "departments": ["name", "location", "budget"],
    "books": ["title", "author_id", "year", "pages"],
    "flights": ["origin", "destination", "departure_time", "duration", "price"],
    "students": ["name", "major", "gpa", "enrollment_year"],
    "invoices": ["supplier_id", "amount", "due_date", "paid"],
    "movies": ["title", "genre", "rating", "release_year"],
}
QUERIES = [
    "the average {} for each {}",
    "the ten rows with the highest {} by {}",
    "all rows where {} is above its average, sorted by {}",
    "the latest {} for every {}",
    "the running total of {} ordered by {}",
    "each {} and its share of all {} values",
]
TASKS = [
    "Schreibe einen kurzen Text über {}.",
    "Erkläre einem Kind {}.",
    "Nenne fünf wichtige Tatsachen über {}.",
    "Erzähle eine Geschichte über {}.",
    "Was sollte man über {} wissen?",
    "Schreibe einen Brief über {}.",
]
TOPICS = [
    "die Geschichte Roms", "gesunde Ernährung", "das Wetter in den Alpen", "den Klimawandel",
    "die Eisenbahn", "das Schachspiel", "die Musik von Bach", "einen Garten im Frühling",
    "den Mond", "das Meer", "den Umgang mit Geld", "das Lernen einer Sprache", "den Wald",
    "ein Dorf im Winter", "die Pyramiden", "das Internet", "die Demokratie", "den Fußball",
    "Hunde und Katzen", "die Reise nach Italien", "das Fahrrad", "die Bäckerei",
]  # fmt: skip
ENDINGS = [" Antworte auf Deutsch.", " Bitte auf Deutsch.", " Antworte in deutscher Sprache."]


def sql(rng):
    table, other = rng.sample(sorted(TABLES), 2)
    schema = ", ".join(f"{each}(id, {', '.join(TABLES[each])})" for each in (table, other))
    query = rng.choice(QUERIES).format(*rng.sample(TABLES[table], 2))
    return f"Tables: {schema}. Write a SQL query that returns {query} in {table}."


def german(rng):
    return rng.choice(TASKS).format(rng.choice(TOPICS)) + rng.choice(ENDINGS)


def prompts(domain, rng):
    """Yield prompts of a domain, `sql` or `german`, without end."""
    while True:
        yield [ChatMessage("user", domain(rng))]
