"""Pages of slots, given to sequences as they grow."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

__all__ = ["NO_PAGE", "assign_pages"]

#: The entry of a table for a page that a sequence has not.
NO_PAGE = -1


def assign_pages(table: Array, pages: int, page: Array, is_token: Array, max_new_pages: int) -> Array:
    """A table in which tokens have their pages, taken from the free ones in the order of sequences.

    Args:
        table: the pages of each sequence in the order of its tokens, shape (batch, pages of a sequence).
        pages: number of pages in all.
        page: which page of its sequence each token is on, shape (batch, tokens).
        is_token: the tokens that are stored; in shape of `page`.
        max_new_pages: number of pages that are new at most, for static shapes.

    Returns:
        The table; an entry stays `NO_PAGE` if no page is free.
    """
    batch, columns = table.shape
    sequence = jnp.arange(batch)[:, None]
    needs_page = jnp.zeros(table.shape, bool).at[sequence, jnp.where(is_token, page, columns)].set(True, mode="drop")
    missing = needs_page & (table == NO_PAGE)
    used = jnp.zeros(pages, bool).at[jnp.where(table == NO_PAGE, pages, table)].set(True, mode="drop")
    (free,) = jnp.nonzero(~used, size=min(max_new_pages, pages), fill_value=NO_PAGE)
    free_index = jnp.cumsum(missing.ravel()).reshape(missing.shape) - 1
    new_pages = free.astype(table.dtype).at[free_index].get(mode="fill", fill_value=NO_PAGE)
    return jnp.where(missing, new_pages, table)
