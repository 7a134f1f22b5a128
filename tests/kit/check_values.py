"""The design publishes values of its formulas."""

CHECK_VALUES = [  # alpha, K, speed-up, growth of operations: the table of the design's theory page, c = 0
    (0.6, 2, 1.96, 1.53),
    (0.7, 3, 2.53, 1.58),
    (0.8, 2, 2.44, 1.23),
    (0.8, 5, 3.69, 1.63),
    (0.9, 2, 2.71, 1.11),
    (0.9, 10, 6.86, 1.60),
]
