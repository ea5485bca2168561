"""Tools that show, number by number, why tiled attention is exact."""
