"""Text for the profile of a mixture of experts: prose, code, mathematics and a conversation."""

SAMPLE_TEXT = '''\
The ferry leaves the north pier at half past six, long before the market opens. On weekdays it
carries mechanics, nurses and two or three teachers; on Saturdays it is full of crates with tomatoes
and young hens. The captain has made the crossing for thirty-one years, and still writes the height
of the tide and the direction of the wind into a grey notebook before she starts the engine.

def moving_average(values: list[float], width: int) -> list[float]:
    """Return the mean of each window of `width` values."""
    total, means = sum(values[:width]), []
    for index in range(width, len(values) + 1):
        means.append(total / width)
        if index < len(values):
            total += values[index] - values[index - width]
    return means

Question: A tank holds 240 litres and loses 3 litres an hour. When is it half empty?
Answer: Half of 240 is 120. At 3 litres an hour, 120 litres take 120 / 3 = 40 hours, so the tank is
half empty after one day and sixteen hours.

| city | inhabitants | altitude (m) |
|---|---|---|
| Quito | 1,763,000 | 2,850 |
| Oslo | 717,000 | 23 |

User: Could you recommend a book about bridges that does not need much mathematics?
Assistant: Of course. Look for an introduction to structures written for general readers: such books
explain beams, arches and cables with drawings, describe a few famous failures, and leave equations
to an appendix. If you prefer photographs, most libraries have a volume on the history of railways.

SELECT customer_id, COUNT(*) AS orders, SUM(price) AS revenue
FROM sales WHERE sold_at >= '2024-01-01' GROUP BY customer_id HAVING COUNT(*) > 5 ORDER BY revenue;

Photosynthesis stores the energy of light in sugar. Chlorophyll absorbs mostly red and blue light,
splits water, and releases oxygen; in a second step, which needs no light, the plant binds carbon
dioxide from the air. Because both steps depend on temperature, leaves in the shade of a forest
work at another pace than those in an open field.

{"name": "sensor-7", "location": {"lat": 47.37, "lon": 8.54}, "readings": [12.5, 12.7, 13.1, null]}

Wenn der Nebel sich hebt, sieht man vom Turm bis zu den Alpen. Au printemps, les touristes montent
par le vieux chemin; en verano prefieren el teleferico. The last cable car goes down at nine.
'''
