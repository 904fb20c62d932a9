"""The page at /, in a browser."""

import pytest
from conftest import FIXTURES
from selenium import webdriver
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
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER[0]
    for option in [*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(option)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(BROWSER[1]))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser, address):
    browser.get(f"{address}/")
    browser.execute_script("localStorage.clear()")
    browser.get(f"{address}/")
    WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#model option"))
    return browser


def at(page, name):
    return page.find_element(By.ID, name)


def wait(page, condition):
    return WebDriverWait(page, 60).until(lambda _: condition())


def said(page):
    """What a screen reader is told once the answer is over."""
    status = lambda: at(page, "status").get_attribute("textContent")
    wait(page, lambda: status().startswith("Answer:"))
    return status().removeprefix("Answer: ")


def setting(page, name, value):
    if at(page, "settings").get_attribute("open") is None:
        at(page, "settings").find_element(By.TAG_NAME, "summary").click()
    field = at(page, name)
    field.clear()
    field.send_keys(value)
    page.execute_script("arguments[0].dispatchEvent(new Event('change'))", field)


def type_in(page, text):
    # To what has the focus, as somebody without a mouse does.
    page.switch_to.active_element.send_keys(text, Keys.ENTER)


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
    assert "first text after" in numbers and "tokens a second" in numbers
    assert "on cpu" in wait(page, lambda: at(page, "about").text), "what it runs on"
    # The next turn goes on from there.
    wait(page, lambda: page.switch_to.active_element.get_attribute("id") == "ask")
    type_in(page, "And at night?")
    wait(page, lambda: len(page.find_elements(By.CSS_SELECTOR, "#log article footer")) == 2)
    last = page.find_elements(By.CSS_SELECTOR, "#log article footer")[1]
    wait(page, lambda: "of them reused" in last.text)
    assert ", 0 of them reused" not in last.text
    at(page, "fresh").click()
    assert not page.find_elements(By.CSS_SELECTOR, "#log article")


def test_an_answer_has_the_form_of_a_schema(page):
    Select(at(page, "model")).select_by_value("language")
    setting(page, "schema", '{"enum": ["Bonn"]}')
    at(page, "ask").send_keys("Where?", Keys.ENTER)
    assert said(page) == '"Bonn"'


def test_an_image_is_looked_at(page):
    Select(at(page, "model")).select_by_value("seeing")
    setting(page, "max_tokens", "3")
    at(page, "file").send_keys(str(FIXTURES / "qwen35-vision" / "images" / "cross.png"))
    wait(page, lambda: at(page, "attached").find_elements(By.TAG_NAME, "li"))
    at(page, "ask").send_keys("What is this?", Keys.ENTER)
    said(page)
    assert page.find_element(By.CSS_SELECTOR, "article.user img").get_attribute("alt") == "cross.png"
    assert not at(page, "error").is_displayed(), at(page, "error").text


def test_what_goes_wrong_is_said(page):
    Select(at(page, "model")).select_by_value("language")
    at(page, "ask").send_keys("long " * 300, Keys.ENTER)
    wait(page, lambda: at(page, "error").is_displayed())
    assert at(page, "error").get_attribute("role") == "alert"
    assert "the context of" in at(page, "error").text
    setting(page, "schema", "{")
    at(page, "again").click()
    wait(page, lambda: "JSON schema" in at(page, "error").text)


def test_everything_has_a_name_and_nothing_is_fetched_elsewhere(page, address):
    tree = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = {"button", "textbox", "combobox", "spinbutton", "MenuListPopup", "searchbox"}
    used = [node for node in tree if not node.get("ignored") and node.get("role", {}).get("value") in controls]
    named = [node.get("name", {}).get("value") for node in used if node["role"]["value"] != "MenuListPopup"]
    assert len(named) > 4 and all(named), named
    fetched = page.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert fetched and all(name.startswith((address, "data:")) for name in fetched), fetched
