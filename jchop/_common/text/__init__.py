"""Tables as text and as HTML; the HTML of objects that show themselves."""

from jchop._common.text.tables import RowReport, TableOrLine, Tables, plain_data, table_lines

__all__ = ["RowReport", "TableOrLine", "Tables", "plain_data", "table_lines"]
