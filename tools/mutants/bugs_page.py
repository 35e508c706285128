"""Planted bugs: the page: data that becomes markup, other sites' requests, and work without a limit."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

BROWSER: Final = "tests/server/page/test_browser.py"
HTTP: Final = "tests/server/page/test_http_page.py"
API: Final = "tests/server/page/test_api.py"
LOCAL: Final = "tests/server/test_local_connection.py"
CROSS_SITE: Final = "tfmq/server/page/cross_site.py"
STATIC: Final = "tfmq/server/page/static"

PAGE: Final = (
    Mutant(
        "text-becomes-markup",
        "no text of the broker becomes markup",
        f"{STATIC}/dom.js",
        "    element.append(child instanceof Node ? child : document.createTextNode(String(child)));\n",
        '    if (child instanceof Node) element.append(child);\n    else element["inner" + "HTML"] += String(child);\n',
        [f"{BROWSER}::test_no_text_of_the_broker_runs_as_script"],
    ),
    Mutant(
        "invisible-characters-are-shown",
        "characters that change the direction of writing are shown as escapes",
        f"{STATIC}/dom.js",
        "export const visibleLines = (text) => String(text).replace(INVISIBLE_IN_LINES, escape);",
        "export const visibleLines = (text) => String(text);",
        [f"{BROWSER}::test_no_text_of_the_broker_runs_as_script"],
    ),
    Mutant(
        "policy-without-trusted-types",
        "the browser refuses statements that read markup from a text",
        "tfmq/server/http_page.py",
        " base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'\"",
        " base-uri 'none'; frame-ancestors 'none'\"",
        [f"{BROWSER}::test_the_policy_stops_script_even_if_it_gets_into_the_page"],
    ),
    Mutant(
        "a-change-happens-without-a-question",
        "each change asks first",
        f"{STATIC}/dialog.js",
        "    dialog.showModal();\n",
        "    dialog.showModal();\n    dialog.querySelector('form').requestSubmit();\n",
        [f"{BROWSER}::test_a_transaction_is_ended_after_a_question_that_names_it"],
    ),
    Mutant(
        "enter-confirms-the-question",
        "a question begins at the button that changes nothing",
        f"{STATIC}/dialog.js",
        "autofocus: fields.length === 0,",
        "disabled: true,",
        [f"{BROWSER}::test_everything_can_be_done_with_the_keyboard"],
    ),
    Mutant(
        "a-refresh-loses-the-focus",
        "the focus stays where it was when the page is loaded again",
        f"{STATIC}/main.js",
        "    if (focused !== undefined) {\n",
        "    if (focused === null) {\n",
        [f"{BROWSER}::test_a_refresh_keeps_focus_and_what_is_open"],
    ),
    Mutant(
        "changes-of-other-sites-are-made",
        "a change that another site's page could send is refused",
        "tfmq/server/http_page.py",
        "        if refusal is not None:\n",
        "        if refusal is not None and not request.body:\n",
        [HTTP],
    ),
    Mutant(
        "the-origin-does-not-matter",
        "a change needs the Origin of this server",
        CROSS_SITE,
        '        if _host_of(headers.get("origin", "")) != headers.get("host", "").lower():\n',
        '        if not headers.get("host", ""):\n',
        [HTTP],
    ),
    Mutant(
        "a-form-makes-a-change",
        "a change is JSON, which no form of another site can send",
        CROSS_SITE,
        '        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":\n',
        '        if not headers.get("content-type", ""):\n',
        [HTTP],
    ),
    Mutant(
        "any-token-fits",
        "the token is that of the page's cookie",
        CROSS_SITE,
        "        if cookie is None or not hmac.compare_digest(",
        '        if cookie is None or not token or hmac.compare_digest(b"", ',
        [HTTP],
    ),
    Mutant(
        "the-cookie-goes-to-other-sites",
        "the cookie is sent only by pages of this site",
        CROSS_SITE,
        "; Path=/; HttpOnly; SameSite=Strict",
        "; Path=/; HttpOnly",
        [HTTP],
    ),
    Mutant(
        "pages-without-end",
        "no page of a list is larger than its limit",
        "tfmq/server/page/arguments.py",
        'return self.number("limit", min(PAGE_ROWS, most), low=1, high=most)',
        'return self.number("limit", min(PAGE_ROWS, most), low=1)',
        [API],
    ),
    Mutant(
        "a-search-without-end",
        "a search by key has a limit of bytes",
        "tfmq/server/page/messages.py",
        " and reading.bytes_read < bytes_max and call.link.now() < until:\n",
        " and call.link.now() < until:\n",
        [API],
    ),
    Mutant(
        "a-search-takes-all-the-time",
        "a search by key has a limit of time",
        "tfmq/server/page/messages.py",
        " and call.link.now() < until:\n",
        " and until:\n",
        [API],
    ),
    Mutant(
        "a-search-skips-what-it-did-not-look-at",
        "a search says how far it has looked",
        "tfmq/server/page/messages.py",
        '        "to": rows[limit].offset if is_cut else reading.offset,\n',
        '        "to": reading.offset,\n',
        [API],
    ),
    Mutant(
        "any-number-of-calls",
        "only so many calls are in progress",
        "tfmq/server/page/api.py",
        "        if self.calls_in_progress >= CALLS_MAX:\n",
        "        if self.calls_in_progress < 0:\n",
        [API],
    ),
    Mutant(
        "a-request-inside-a-reply",
        "an operation continues in a later turn than the reply",
        "tfmq/server/local_connection.py",
        "        if self._is_executing and self.now() < self._slice_ends:\n",
        "        if self.now() < self._slice_ends:\n",
        [LOCAL],
    ),
    Mutant(
        "long-operations-keep-the-server-busy",
        "a long operation lets the server do other work",
        "tfmq/server/local_connection.py",
        "        if self._is_executing and self.now() < self._slice_ends:\n",
        "        if self._is_executing:\n",
        [LOCAL],
    ),
    Mutant(
        "requests-of-the-page-are-not-checked",
        "a request of the page is checked like one from the network",
        "tfmq/server/local_connection.py",
        "            request = command.request.decode(_header_of(encoded, context.header_bounds), command.name, 2)\n",
        "            request = pending.request\n",
        [LOCAL],
    ),
)
