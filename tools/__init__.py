"""Tools of the checkout: the demo, benchmarks, crash rigs, generators of docs."""
