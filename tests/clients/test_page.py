"""The page at /, in a browser."""

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from conftest import FIXTURES
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

BROWSER = ["/usr/bin/chromium", "/usr/bin/chromedriver"]
# Without its services: the browser asks nobody but the server.
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1000,800",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    # What fades is looked at once it has.
    "--force-prefers-reduced-motion",
]
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
# Rules that axe-core can check without a person.
AXE = "axe.run(document, {resultTypes: ['violations']}).then(found => arguments[0](found.violations), arguments[0])"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER[0]
    for option in [*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(option)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(BROWSER[1]))
    browser.set_script_timeout(60)
    yield browser
    browser.quit()


def opened(browser, address, at="", ready="#model option"):
    """The page as somebody sees it who was never here."""
    browser.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": address, "storageTypes": "all"})
    browser.get("about:blank")
    browser.get(f"{address}/{at}")
    browser.execute_script("sessionStorage.clear()")
    WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.CSS_SELECTOR, ready))
    return browser


@pytest.fixture
def page(browser, address):
    return opened(browser, address)


@pytest.fixture(scope="module")
def store(forged, tmp_path_factory):
    """The address of a server that serves one model, and whose catalog copies others."""
    served = [
        ("language", forged("language", FIXTURES / "llama3-tiny", "--max-ctx", "200")),
        ("kokoro", forged("kokoro", FIXTURES / "kokoro-tiny")),
        ("whisper", forged("whisper", FIXTURES / "whisper-tiny")),
    ]
    index = [
        ("other", served[0][1]),
        ("seeing", forged("seeing", FIXTURES / "qwen3vl-tiny", "--max-ctx", "200", "--recipe-option", "image-size=48")),
        ("broken", served[0][1]),
        *((f"many-{number}", served[0][1]) for number in range(7)),
    ]
    options = [item for name, folder in served for item in ("--serve", f"{name}={folder}")]
    options += [item for name, folder in index for item in ("--index", f"{name}={folder}")]
    program = [os.environ["QHX_CATALOG_SERVER"], tmp_path_factory.mktemp("models"), *options]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture
def shop(browser, store):
    return opened(browser, store, "#models", "#more .model")


def at(page, name):
    return page.find_element(By.ID, name)


def find(page, selector):
    return page.find_element(By.CSS_SELECTOR, selector)


def wait(page, condition):
    # The page draws again while it is looked at.
    ignored = [NoSuchElementException, StaleElementReferenceException]
    return WebDriverWait(page, 60, 0.1, ignored).until(lambda _: condition())


def status(page):
    """What a screen reader is told."""
    return at(page, "status").get_attribute("textContent")


def said(page):
    """The answer, which a screen reader is told once it is over."""
    wait(page, lambda: status(page).startswith("Answer:"))
    return status(page).removeprefix("Answer: ")


def setting(page, name, value):
    at(page, "options").click()
    field = at(page, name)
    if field.tag_name == "select":
        Select(field).select_by_value(value)
    else:
        field.clear()
        field.send_keys(value)
    page.execute_script("arguments[0].dispatchEvent(new Event('change'))", field)
    find(page, "#settings [data-close]").click()


def type_in(page, text):
    # To what has the focus, as somebody without a mouse does.
    page.switch_to.active_element.send_keys(text, Keys.ENTER)


def tab_to(page, name, by="id"):
    """Moves the focus to a control, as somebody does who has no mouse."""
    for _ in range(80):
        focused = page.switch_to.active_element
        if (focused.get_attribute(by) or "") == name:
            return focused
        focused.send_keys(Keys.TAB)
    raise AssertionError(f"the keyboard does not reach {name}")


def ask(page, text):
    page.execute_script("document.getElementById('status').textContent = ''")
    at(page, "ask").send_keys(text, Keys.ENTER)
    return said(page)


def card(page, name):
    return page.find_element(By.CSS_SELECTOR, f'.model[data-name="{name}"]')


def press(page, name, action):
    selector = f'.model[data-name="{name}"] [data-action="{action}"]'
    wait(page, lambda: find(page, selector).click() is None)


def badge(page, name):
    return page.execute_script(
        "return document.querySelector(`.model[data-name='${arguments[0]}'] .badge`)?.textContent", name
    )


@contextmanager
def phone(page):
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        yield
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def dark(page):
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        yield
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def accessible(page, where):
    """Asserts that axe-core finds nothing wrong, and that nothing has to be scrolled sideways."""
    if not page.execute_script("return Boolean(window.axe)"):
        source = Path(os.environ["QHX_NODE_MODULES"]) / "axe-core" / "axe.min.js"
        # By the debugger, since the page allows no scripts but its own.
        page.execute_script(source.read_text(encoding="utf-8"))
    found = page.execute_async_script(AXE)
    assert isinstance(found, list), found
    assert not found, (where, [(one["id"], [node["html"] for node in one["nodes"]]) for one in found])
    wide = page.execute_script(
        """return [document.documentElement, ...document.querySelectorAll("main > section, #log, dialog[open]")]
          .filter(element => element.scrollWidth > element.clientWidth).map(element => element.id || element.tagName);"""
    )
    assert not wide, (where, wide)


def test_a_chat_needs_the_keyboard_only(page, sky):
    question, text = sky
    Select(at(page, "model")).select_by_value("language")
    setting(page, "temperature", "0")
    page.execute_script("document.getElementById('ask').focus()")
    type_in(page, question)
    assert said(page) == text
    articles = page.find_elements(By.CSS_SELECTOR, "#log article")
    assert [article.get_attribute("class") for article in articles] == ["user", "assistant"]
    assert articles[1].find_element(By.CSS_SELECTOR, ":scope > .words").text == text
    numbers = articles[1].find_element(By.TAG_NAME, "footer").text
    assert "tokens a second" in numbers and "prompt of" in numbers
    assert "on cpu" in wait(page, lambda: at(page, "about").text), "what it runs on"
    # The next turn goes on from there.
    wait(page, lambda: page.switch_to.active_element.get_attribute("id") == "ask")
    type_in(page, "And at night?")
    last = ".assistant:last-of-type .numbers"
    wait(page, lambda: "of them reused" in find(page, last).text and len(page.find_elements(By.TAG_NAME, "article")) == 4)
    assert ", 0 of them reused" not in find(page, last).text
    assert "first text after" in find(page, last).text
    tab_to(page, "fresh").send_keys(Keys.ENTER)
    assert not page.find_elements(By.CSS_SELECTOR, "#log article")
    assert page.switch_to.active_element.get_attribute("id") == "ask"


def test_an_answer_has_the_form_of_a_schema(page):
    Select(at(page, "model")).select_by_value("language")
    setting(page, "schema", '{"enum": ["Bonn"]}')
    assert ask(page, "Where?") == '"Bonn"'


def test_an_image_is_looked_at(page):
    Select(at(page, "model")).select_by_value("seeing")
    setting(page, "max_tokens", "3")
    at(page, "file").send_keys(str(FIXTURES / "qwen35-vision" / "images" / "cross.png"))
    wait(page, lambda: at(page, "attached").find_elements(By.TAG_NAME, "li"))
    ask(page, "What is this?")
    assert find(page, "article.user img").get_attribute("alt") == "cross.png"
    assert not at(page, "error").is_displayed(), at(page, "error").text


def test_what_goes_wrong_is_said(page):
    Select(at(page, "model")).select_by_value("language")
    # Not typed, which takes seconds.
    page.execute_script("document.getElementById('ask').value = 'long '.repeat(300)")
    at(page, "ask").send_keys(Keys.ENTER)
    wait(page, lambda: at(page, "error").is_displayed())
    assert at(page, "error").get_attribute("role") == "alert"
    assert "the context of" in at(page, "error").text
    setting(page, "schema", "{")
    find(page, ".retry").click()
    wait(page, lambda: "JSON schema" in at(page, "error").text)


def test_everything_has_a_name_and_nothing_is_fetched_elsewhere(page, address):
    tree = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = {"button", "textbox", "combobox", "spinbutton", "MenuListPopup", "searchbox"}
    used = [node for node in tree if not node.get("ignored") and node.get("role", {}).get("value") in controls]
    named = [node.get("name", {}).get("value") for node in used if node["role"]["value"] != "MenuListPopup"]
    assert len(named) > 4 and all(named), named
    fetched = page.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert fetched and all(name.startswith((address, "data:")) for name in fetched), fetched


def test_chats_are_kept_renamed_exported_and_deleted(page):
    Select(at(page, "model")).select_by_value("language")
    setting(page, "max_tokens", "4")
    ask(page, "The first chat")
    at(page, "fresh").click()
    second = ask(page, "The second chat")
    page.refresh()
    titles = lambda: [one.text for one in page.find_elements(By.CSS_SELECTOR, "#list .open")]
    wait(page, lambda: titles() == ["The second chat", "The first chat"])
    assert find(page, ".assistant > .words").text.split() == second.split()
    page.find_elements(By.CSS_SELECTOR, "#list .open")[1].click()
    assert find(page, ".user > .words").text == "The first chat"
    page.find_elements(By.CSS_SELECTOR, "#list .more")[1].click()
    assert page.switch_to.active_element.get_attribute("id") == "name"
    at(page, "name").send_keys("Rivers", Keys.TAB)
    wait(page, lambda: "Rivers" in titles())
    # What is saved as a file.
    saved = """const [done] = arguments, make = URL.createObjectURL;
    URL.createObjectURL = blob => { blob.text().then(done); URL.createObjectURL = make; return make(blob); };
    document.getElementById("export").click();"""
    exported = json.loads(page.execute_async_script(saved))
    assert exported["title"] == "Rivers" and exported["messages"][0] == {"role": "user", "content": "The first chat"}
    at(page, "delete").click()
    at(page, "yes").click()
    wait(page, lambda: titles() == ["The second chat"])
    page.refresh()
    wait(page, lambda: titles() == ["The second chat"])


def test_a_last_message_is_edited_and_an_answer_retried(page):
    Select(at(page, "model")).select_by_value("language")
    setting(page, "max_tokens", "4")
    ask(page, "One")
    find(page, ".edit").click()
    assert at(page, "ask").get_attribute("value") == "One" and at(page, "editing").is_displayed()
    at(page, "ask").clear()
    ask(page, "Two")
    words = lambda kind: [one.text for one in page.find_elements(By.CSS_SELECTOR, f".{kind} > .words")]
    assert words("user") == ["Two"] and len(words("assistant")) == 1
    page.execute_script("document.getElementById('status').textContent = ''")
    find(page, ".retry").click()
    said(page)
    assert words("user") == ["Two"] and len(words("assistant")) == 1


def test_a_call_is_shown_and_its_result_sent(page):
    Select(at(page, "model")).select_by_value("calling")
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"day": {"enum": ["today"]}},
                                                  "required": ["day"], "additionalProperties": False}}
    setting(page, "tools", json.dumps([{"type": "function", "function": function}]))
    setting(page, "tool_choice", "required")
    assert "calls weather" in ask(page, "How is it?")
    assert "today" in find(page, ".call pre").text
    setting(page, "tool_choice", "none")
    setting(page, "max_tokens", "4")
    find(page, "article form textarea").send_keys("sunny")
    page.execute_script("document.getElementById('status').textContent = ''")
    find(page, "article form button").click()
    said(page)
    assert find(page, ".result").text == "weather: sunny"


def test_markdown_is_shown_and_markup_stays_text(page):
    text = "\n".join([
        "# Title", "", "Some **bold** and `code` <img src=x onerror=alert(1)>", "", "- one", "  - inner", "- two", "",
        "| a | b |", "|---|---|", "| 1 | 2 |", "", "[safe](https://example.org) [bad](javascript:alert(1))", "",
        "```rust", "fn main() {}", "```",
    ])
    shown = page.execute_async_script(
        """const [text, done] = arguments;
        import(new URL("page/markdown.js", location)).then(({show}) => {
          const element = document.createElement("div");
          show(element, text.slice(0, 40));
          show(element, text);
          done(element.innerHTML);
        });""",
        text,
    )
    for part in ["<h4>Title</h4>", "<strong>bold</strong>", "<code>code</code>", "<ul><li>inner</li></ul>", "<td>2</td>",
                 '<a href="https://example.org"', "&lt;img", "<code>fn main() {}</code>"]:
        assert part in shown, (part, shown)
    assert "<img" not in shown and 'href="javascript' not in shown, shown


def test_a_model_is_pulled_with_progress_used_and_removed(shop):
    assert badge(shop, "other") == "Not here" and "Apache-2.0" in card(shop, "other").text
    press(shop, "other", "pull")
    bar = ".model[data-name='other'] progress"
    value = lambda: shop.execute_script("return document.querySelector(arguments[0])?.value", bar)
    wait(shop, lambda: (value() or 0) > 0)
    assert "fetching" in find(shop, ".pull").text
    wait(shop, lambda: badge(shop, "other") == "Ready")
    assert "is ready" in status(shop)
    press(shop, "other", "load")
    wait(shop, lambda: badge(shop, "other") == "Loaded")
    press(shop, "other", "chat")
    wait(shop, lambda: at(shop, "model").get_attribute("value") == "other" and at(shop, "ask").is_displayed())
    setting(shop, "max_tokens", "4")
    ask(shop, "Hello")
    shop.get(shop.current_url.replace("#chat", "#models"))
    wait(shop, lambda: badge(shop, "other") == "Loaded")
    press(shop, "other", "load")
    wait(shop, lambda: badge(shop, "other") == "Ready")
    press(shop, "other", "remove")
    at(shop, "yes").click()
    wait(shop, lambda: badge(shop, "other") == "Not here")


def test_a_pull_is_cancelled_and_one_that_fails_says_why(shop):
    # A page that comes later follows the pull.
    press(shop, "seeing", "pull")
    wait(shop, lambda: badge(shop, "seeing") == "Pulling")
    shop.refresh()
    wait(shop, lambda: badge(shop, "seeing") == "Pulling" and "fetching" in find(shop, ".pull").text)
    press(shop, "seeing", "cancel")
    wait(shop, lambda: badge(shop, "seeing") == "Not here")
    assert not at(shop, "error").is_displayed(), at(shop, "error").text
    press(shop, "broken", "pull")
    wait(shop, lambda: "accept them" in at(shop, "error").text)
    assert "terms are not accepted" in card(shop, "broken").text


def test_more_pulls_than_connections_are_under_way(shop, store):
    names = [f"many-{number}" for number in range(7)]
    for name in names:
        press(shop, name, "pull")
    # The page still asks for other things.
    shop.get(shop.current_url.replace("#models", "#machine"))
    wait(shop, lambda: shop.find_elements(By.CSS_SELECTOR, "#checks li"))
    shop.get(shop.current_url.replace("#machine", "#models"))
    wait(shop, lambda: all(badge(shop, name) == "Pulling" for name in names[2:]))
    for name in reversed(names):
        selector = f".model[data-name='{name}'] [data-action='cancel']"
        shop.execute_script("document.querySelector(arguments[0])?.click()", selector)
    wait(shop, lambda: not shop.find_elements(By.CSS_SELECTOR, ".badge.pulling"))


def test_models_are_managed_by_keyboard_alone(shop):
    tab_to(shop, "find").send_keys("seeing")
    wait(shop, lambda: len(shop.find_elements(By.CSS_SELECTOR, "#more .model")) == 1)
    tab_to(shop, "pull", "data-action").send_keys(Keys.ENTER)
    wait(shop, lambda: badge(shop, "seeing") == "Ready")
    tab_to(shop, "remove", "data-action").send_keys(Keys.ENTER)
    tab_to(shop, "yes").send_keys(Keys.ENTER)
    wait(shop, lambda: badge(shop, "seeing") == "Not here")


def test_speech_is_dictated_and_answers_are_read_out(browser, store):
    page = opened(browser, store)
    at(page, "dictate").click()
    wait(page, lambda: status(page) == "Recording.")
    at(page, "dictate").click()
    wait(page, lambda: status(page).startswith("Heard:"))
    setting(page, "max_tokens", "4")
    ask(page, "Hello")
    page.execute_script("HTMLMediaElement.prototype.play = function() { window.played = this.src; this.onended(); }")
    find(page, ".listen").click()
    wait(page, lambda: (page.execute_script("return window.played") or "").startswith("blob:"))


def test_models_speak_and_transcribe_without_a_chat(shop, store, tmp_path):
    press(shop, "kokoro", "speak")
    at(shop, "words").send_keys("Hello")
    at(shop, "speak").click()
    wait(shop, lambda: at(shop, "spoken").is_displayed() and at(shop, "save").is_displayed())
    find(shop, "#speaking [data-close]").click()
    body = json.dumps({"model": "kokoro", "input": "Hello", "response_format": "wav"}).encode()
    request = Request(f"{store}/v1/audio/speech", body, {"content-type": "application/json"})
    audio = tmp_path / "hello.wav"
    audio.write_bytes(urlopen(request, timeout=60).read())
    press(shop, "whisper", "hear")
    at(shop, "heard-file").send_keys(str(audio))
    wait(shop, lambda: status(shop).startswith("Heard:"))
    assert at(shop, "heard").get_attribute("value") in status(shop)
    assert not at(shop, "hearing-why").is_displayed(), at(shop, "hearing-why").text


def test_an_answer_is_stopped_by_escape(page):
    Select(at(page, "model")).select_by_value("language")
    ask(page, "Hello")
    slow = {"offline": False, "latency": 0, "downloadThroughput": 2000, "uploadThroughput": -1}
    page.execute_cdp_cmd("Network.enable", {})
    page.execute_cdp_cmd("Network.emulateNetworkConditions", slow)
    try:
        at(page, "ask").send_keys("Go on", Keys.ENTER)
        wait(page, lambda: at(page, "stop").is_displayed())
        page.switch_to.active_element.send_keys(Keys.ESCAPE)
        wait(page, lambda: not at(page, "stop").is_displayed())
    finally:
        page.execute_cdp_cmd("Network.emulateNetworkConditions", {**slow, "downloadThroughput": -1})
        page.execute_cdp_cmd("Network.disable", {})
    assert not at(page, "error").is_displayed(), at(page, "error").text
    assert page.find_elements(By.CSS_SELECTOR, ".user")[-1].find_element(By.CSS_SELECTOR, ":scope > .words").text == "Go on"


def test_images_are_pasted_and_dropped(page):
    Select(at(page, "model")).select_by_value("seeing")
    wait(page, lambda: at(page, "attach").is_displayed())
    events = """const [name, done] = arguments, data = new DataTransfer();
    document.createElement("canvas").toBlob(blob => {
      data.items.add(new File([blob], name, {type: "image/png"}));
      const paste = new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true});
      const drop = new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true});
      document.getElementById("ask").dispatchEvent(name === "pasted.png" ? paste : drop);
      done();
    });"""
    for name in ["pasted.png", "dropped.png"]:
        page.execute_async_script(events, name)
        wait(page, lambda: name in at(page, "attached").text)
    find(page, "[aria-label='Remove pasted.png']").click()
    assert "pasted" not in at(page, "attached").text and "dropped" in at(page, "attached").text


def test_chats_beyond_the_bound_are_not_kept(page):
    full = """const [done] = arguments;
    import(new URL("page/store.js", location)).then(({keep}) => keep({id: "a", turns: "a".repeat(65e6)}))
      .then(() => done("kept"), error => done(error.message));"""
    said = page.execute_async_script(full)
    assert "not kept" in said and "64 MB" in said and "delete others" in said


def test_no_view_or_dialog_hinders_anybody(browser, store):
    page = opened(browser, store)
    setting(page, "max_tokens", "12")
    ask(page, "Name three rivers.")
    chat = page.current_url.split("#")[0]

    def views():
        for view in ["chat", "chats", "models", "machine"]:
            page.get(f"{chat}#{view}")
            if view == "models":
                wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#more .model"))
            if view == "machine":
                wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#checks li"))
            yield view

    def dialogs():
        page.get(f"{chat}#chats")
        at(page, "options").click()
        yield "settings"
        find(page, "#settings [data-close]").click()
        find(page, "#list .more").click()
        yield "entry"
        at(page, "delete").click()
        yield "decide"
        at(page, "no").click()
        page.get(f"{chat}#models")
        for name, action in [("kokoro", "speak"), ("whisper", "hear")]:
            wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#more .model"))
            press(page, name, action)
            yield action
            find(page, "dialog[open] [data-close]").click()

    for view in views():
        accessible(page, view)
    for dialog in dialogs():
        accessible(page, dialog)
    with dark(page):
        back = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(20, 23, 28)", back
        for view in views():
            accessible(page, f"dark {view}")
        for dialog in dialogs():
            accessible(page, f"dark {dialog}")
    with phone(page):
        for view in views():
            accessible(page, f"phone {view}")
        for dialog in dialogs():
            accessible(page, f"phone {dialog}")


def test_a_theme_that_is_chosen_stays(page):
    at(page, "theme").click()
    at(page, "theme").click()
    assert at(page, "theme").text == "Theme: dark"
    page.refresh()
    assert page.execute_script("return getComputedStyle(document.body).colorScheme") == "dark"
    assert at(page, "theme").text == "Theme: dark"


def test_a_missing_key_is_asked_for(browser, qhx, forged, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("secret\n")
    bundle = forged("language", FIXTURES / "llama3-tiny", "--max-ctx", "200")
    server = qhx("serve", bundle, "--port", "0", "--backend", "cpu", "--api-key-file", keys)
    page = opened(browser, server.stdout.readline().strip(), ready="#settings[open]")
    assert page.switch_to.active_element.get_attribute("id") == "key"
    at(page, "key").send_keys("secret", Keys.TAB)
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))
    server.terminate()
    assert server.wait(60) == 0
