"""The server's page in a browser: `make test-page`. Screenshots are left in build/page."""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support.numerics import EXACT
from support.paths import ROOT
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.extraction.extractor import Extractor
from llamatap.serve import ServerOptions

SHOTS = ROOT / "build" / "page"
HOSTILE = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>'


class Page:
    """The page of a server, as a person uses it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, self.one("body").text
            time.sleep(0.02)

    def loaded(self) -> Page:
        self.wait(lambda: self.all("#model option"))
        return self

    def fill(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def ask(self, prompt: str | None = None, layers: str | None = None) -> None:
        if prompt is not None:
            self.fill("#prompt", prompt)
        if layers is not None:
            self.fill("#layers", layers)
        # Clear the old result first, so that the wait below is for the new one.
        self.script("document.querySelector('#map').replaceChildren()")
        self.one("#ask button").click()

    def show(self, prompt: str | None = None, layers: str | None = None) -> None:
        self.ask(prompt, layers)
        self.wait(lambda: self.all("#map td") or self.text("#error"))
        assert self.text("#error") == ""

    def failed(self) -> str:
        """The message that a request ends with."""
        self.wait(lambda: self.text("#error"))
        return self.text("#error")

    def measure(self, name: str) -> None:
        self.one(f"[name=measure][value={name}]").click()

    def cells(self) -> NDArray[np.float64]:
        """Values that the map gives to a screen reader, (tokens, layers); NaN where a cell is empty."""
        labels = self.script(
            "return [...document.querySelectorAll('#map tbody tr')].map("
            "(line) => [...line.querySelectorAll('td')].map((cell) => cell.ariaLabel))"
        )
        found = [[label.rsplit(": ", 1)[1].replace("none", "nan") for label in line] for line in labels]
        return np.array(found, np.float64)

    def shot(self, name: str, *, width: int = 1200, scheme: str = "light") -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        # Nothing but the map and the table may need to be scrolled sideways.
        assert self.script("return document.documentElement.scrollWidth") <= width
        whole = {"captureBeyondViewport": True}
        image = self.driver.execute_cdp_cmd("Page.captureScreenshot", whole)["data"]
        (SHOTS / f"{name}.png").write_bytes(base64.b64decode(image))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    browser, service = shutil.which("chromium"), shutil.which("chromedriver")
    assert browser, "chromium is missing; `make test-page` installs it"
    assert service, "chromedriver is missing; `make test-page` installs it"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # As root there is no sandbox, and containers have little shared memory.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(service))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyLlama()
    # A first token (BOS) as it is in many models: far longer than the others.
    tiny.weights["token_embd.weight"][1] *= 100
    return tiny.write(tmp_path_factory.mktemp("page") / "tiny.gguf")


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running([tiny_options(path)]) as found:
        yield found


@pytest.fixture
def page(driver: Any, server: Running) -> Page:
    return Page(driver, server.url).loaded()


def states(path: Path, prompt: str) -> NDArray[np.float64]:
    """The states of all layers, (tokens, layers, width), as transformers counts them."""
    with lt.Model(path) as model:
        found = Extractor(model, **EXACT)(prompt, layers=[*range(model.n_layer), "norm"])
        return found.array.astype(np.float64)


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return found


def test_the_map_of_all_layers(page: Page, path: Path) -> None:
    prompt = "A-map-of-states"
    page.show(prompt)
    expected = states(path, prompt)
    n_tokens, n_layers, _ = expected.shape
    assert (n_tokens, n_layers) == (16, 5)
    heads = [cell.get_attribute("textContent") for cell in page.all("#map thead th")]
    assert heads == ["Token", "0", "1", "2", "3", "4"]
    rows = [cell.get_attribute("textContent") for cell in page.all("#map tbody th")]
    assert rows == ["<s>", *prompt]
    np.testing.assert_allclose(page.cells(), np.linalg.norm(expected, axis=-1), rtol=1e-3)
    page.shot("tiny-norm")

    page.measure("before")
    before = np.full((n_tokens, n_layers), np.nan)
    before[:, 1:] = cosine(expected[:, 1:], expected[:, :-1])
    np.testing.assert_allclose(page.cells(), before, atol=1e-3)
    assert len(page.all("#map td.none")) == n_tokens

    page.measure("last")
    last = cosine(expected, expected[-1:])
    last[-1] = np.nan
    np.testing.assert_allclose(page.cells(), last, atol=1e-3)
    page.shot("tiny-last-dark", scheme="dark")
    page.shot("tiny-last-narrow", width=400)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("2", [2]), ("0, 2..3", [0, 2, 3]), ("-1 -3", [2, 4]), ("n", [4]), ("3,1..n,-5", [0, 1, 2, 3, 4])],
)
def test_some_layers(page: Page, path: Path, text: str, layers: list[int]) -> None:
    page.show("some", text)
    page.measure("before")
    expected = states(path, "some")
    before = np.full(expected.shape[:2], np.nan)
    before[:, 1:] = cosine(expected[:, 1:], expected[:, :-1])
    # The layer before is the model's, not the one shown before.
    np.testing.assert_allclose(page.cells(), before[:, layers], atol=1e-3)


@pytest.mark.parametrize("text", ["5", "-6", "3..1", "x", "1.5", "0..", "", "0..1000000000000", "1e0"])
def test_layers_that_are_none(page: Page, text: str) -> None:
    page.ask("some", text)
    assert "ayer" in page.failed()
    assert page.one("#layers").get_attribute("aria-invalid") == "true"
    page.show("some", "1")
    assert page.one("#layers").get_attribute("aria-invalid") is None


def test_colours_grow_with_values_and_the_legend_tells_them(page: Page) -> None:
    page.show("colours")
    norms = page.cells().ravel()
    colours = page.script(
        "return [...document.querySelectorAll('#map td')].map((cell) => cell.style.backgroundColor)"
    )
    lightness = [
        float(np.dot([0.2126, 0.7152, 0.0722], [int(part) for part in colour[4:-1].split(",")]))
        for colour in colours
    ]
    # Cells of one label may differ by what the label leaves out.
    assert (np.diff(np.array(lightness)[np.argsort(norms)]) > -1).all()
    ticks = [float(tick.text) for tick in page.all("#ticks span")]
    np.testing.assert_allclose(ticks, np.geomspace(norms.min(), norms.max(), 5), rtol=0.06)
    assert "logarithmic" in (page.one("#legend").get_attribute("aria-label") or "")
    page.one("#no-first").click()
    ticks = [float(tick.text) for tick in page.all("#ticks span")]
    rest = page.cells()[1:]
    assert rest.max() < norms.max() / 10
    np.testing.assert_allclose([ticks[0], ticks[-1]], [rest.min(), rest.max()], rtol=0.06)


def test_the_keyboard_walks_and_a_table_has_the_numbers(page: Page) -> None:
    page.show("keys")
    page.script("document.querySelector('#map td').focus()")
    for key in (Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.END):
        page.driver.switch_to.active_element.send_keys(key)
    label = page.driver.switch_to.active_element.get_attribute("aria-label")
    assert label.startswith("Token 2, e, layer 4: ")
    tip = page.text("#tip")
    assert tip.splitlines()[:2] == [f"Token 2: e (id {ord('e') + 3})", "Layer 4"]
    assert tip.endswith(label.rsplit(": ")[-1])
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == label
    assert len(page.all("#map [tabindex='0']")) == 1
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.one("#tip").is_displayed()

    assert not page.all("#numbers td")
    page.one("summary").click()
    page.wait(lambda: page.all("#numbers tbody tr"))
    numbers = [
        [cell.text for cell in line.find_elements(By.TAG_NAME, "td")]
        for line in page.all("#numbers tbody tr")
    ]
    np.testing.assert_array_equal(np.array(numbers, np.float64)[:, 1:], page.cells())


def test_a_long_text_is_cut_and_the_page_says_so(page: Page) -> None:
    page.show("short")
    assert not page.one("#cut").is_displayed()
    page.show("x" * 300, "0..1")
    assert page.cells().shape == (128, 2)
    assert "first 128 tokens" in page.text("#cut")


def test_a_server_that_takes_less(driver: Any, path: Path) -> None:
    with running([tiny_options(path)], ServerOptions(max_length=5)) as server:
        page = Page(driver, server.url).loaded()
        assert "the first 5 tokens" in page.text("#prompt-hint")
        page.show("x" * 300)
        assert page.cells().shape == (5, 5)
        assert "first 5 tokens" in page.text("#cut")


def test_errors_are_text(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    page.script("document.querySelector('#prompt').value = ''")
    page.ask()
    assert "empty" in page.failed()
    page.show("good")

    def fails(*_: Any, **__: Any) -> Any:
        raise lt.EngineError(f"the engine fails on purpose {HOSTILE}")

    with monkeypatch.context() as patch:
        patch.setattr(Extractor, "__call__", fails)
        page.ask("bad")
        assert page.failed() == f"the engine fails on purpose {HOSTILE}"
    assert not page.all("#error *")
    page.show("good again")


def test_limits_of_the_server_are_text(driver: Any, path: Path) -> None:
    limits = ServerOptions(max_response_bytes=1000, max_body_bytes=2000)
    with running([tiny_options(path)], limits) as server:
        page = Page(driver, server.url).loaded()
        page.ask("a few tokens")
        assert "this server allows 1000 per response" in page.failed()
        page.script("document.querySelector('#prompt').value = 'x'.repeat(5000)")
        page.ask()
        page.wait(lambda: "2000 bytes" in page.text("#error"))


def test_a_server_that_went_away(driver: Any, path: Path) -> None:
    with running([tiny_options(path)]) as server:
        page = Page(driver, server.url).loaded()
    page.ask("anybody there?")
    assert page.failed() == "The server cannot be reached."


def test_the_key_of_a_server(driver: Any, path: Path) -> None:
    with running([tiny_options(path)], ServerOptions(api_key="s3cret")) as server:
        page = Page(driver, server.url)
        assert "API key" in page.failed()
        page.fill("#key", "wrong")
        page.one("#key-form button").click()
        page.wait(lambda: "did not take" in page.text("#error"))
        page.shot("key")
        page.fill("#key", "s3cret")
        page.one("#key-form button").click()
        page.loaded()
        page.wait(lambda: page.one("#ask").is_displayed())
        page.show("let in")
        assert not page.one("#key-form").is_displayed()
        assert page.script("return localStorage.length") == 0
        assert page.script("return Object.values(sessionStorage)") == ["s3cret"]
        assert not driver.get_cookies()
        # The key is still there when the page is loaded again.
        driver.refresh()
        page.loaded()


def test_what_people_and_models_write_is_text(
    driver: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lt.Model, "token_bytes", lambda *_, **__: HOSTILE.encode())
    with running([tiny_options(path, name=HOSTILE)]) as server:
        page = Page(driver, server.url).loaded()
        page.show(HOSTILE)
        page.one("summary").click()
        page.wait(lambda: page.all("#numbers tbody tr"))
        page.script("document.querySelector('#map td').focus()")
        assert HOSTILE.replace(" ", "·") in page.text("#tip")
        assert HOSTILE in page.text("#result-title")
        assert page.one("#map tbody th").text == HOSTILE.replace(" ", "·")
        assert not page.all("img")
        assert len(page.all("script")) == 1
        assert page.script("return window.hit") is None


def test_the_policy_lets_no_other_script_run(page: Page, server: Running) -> None:
    headers = httpx.get(server.url).headers
    assert "unsafe" not in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    page.driver.get_log("browser")
    page.driver.refresh()
    page.loaded().show("policy")
    # The page by itself violates nothing of its policy.
    assert page.driver.get_log("browser") == []
    page.script(
        "const box = document.body.appendChild(document.createElement('div'));"
        "box.innerHTML = arguments[0];"
        "box.appendChild(document.createElement('script')).textContent = 'window.hit = 1';",
        HOSTILE,
    )
    page.wait(lambda: "Content Security Policy" in str(page.driver.get_log("browser")))
    assert page.script("return window.hit") is None
