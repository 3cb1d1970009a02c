"""The page `/ui` in a browser: filled in, run, read by a keyboard and by the rules for screen readers, copied."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.serving.server import serving
from tests.unit.serving.conftest import Blurred, digits_model
from tests.unit.serving.test_servable import copied

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium, which Debian packages as `chromium`")
playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
HOSTILE = "<img src=x onerror=alert(1)> & \"'"


@pytest.fixture(scope="module")
def page_server(exported, tmp_path_factory):
    root = tmp_path_factory.mktemp("shown")
    for name in ("digits", "kinds", "blurred"):
        shutil.copytree(exported(name), root / name / "1")
    shutil.copytree(exported("digits"), root / HOSTILE / "7")
    copied(exported("digits"), root)
    with serving(root) as server:
        server.wait_for_log("model is not loaded", model="bundle")
        server.wait_for_log("model is served", model="kinds")
        yield server


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--headless"])
        yield browser
        browser.close()


@pytest.fixture
def page(page_server, browser):
    page = browser.new_page(color_scheme="light")
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"http://{page_server.http}/ui")
    yield page
    page.close()
    assert faults == []


def choose(page, model):
    page.get_by_role("button", name=re.compile(f"^{re.escape(model)} ?version")).click()
    playwright.expect(page.get_by_role("heading", level=2)).to_have_text(model)
    playwright.expect(page.get_by_role("button", name="Run")).to_be_visible()


def run(page):
    page.get_by_role("button", name="Run").click()
    playwright.expect(page.locator("#took")).to_contain_text("Answered in")


def table(page, output):
    region = page.get_by_role("region", name=f"Values of {output}")
    rows = region.locator("tbody tr").all()
    return np.array([[float(cell) for cell in row.locator("td").all_inner_texts()] for row in rows])


def eager(x):
    with torch.no_grad():
        return digits_model()(torch.as_tensor(x, dtype=torch.float32)).numpy()


def test_form_is_filled_from_the_recorded_call_and_its_answer_is_eagers(page):
    choose(page, "digits")
    assert page.get_by_label("Shape of input").input_value() == "5, 8"
    run(page)
    x = torch.linspace(-1, 1, 40).reshape(5, 8)
    np.testing.assert_allclose(table(page, "output"), eager(x), rtol=1e-4, atol=1e-5)
    names = np.array(["low", "<b>mid</b>", "high"])[eager(x).argmax(1)]
    for row, name in enumerate(names):
        playwright.expect(page.get_by_text(f"[{row}]: {name} ")).to_be_visible()


WRONG = {
    "count": ("2, 8", "1 2 3", "input: the shape [2,8] takes 16 values, and there are 3"),
    "word": ("1, 8", "1 2 3 4 5 6 7 x", "input: x is no value of FP32"),
    "shape": ("a, 8", "1", "input: the shape is a list of sizes, such as 1, 8"),
    "refused": ("1, 4", "1 2 3 4", "`input`: expected the shape [-1, 8], got [1, 4]"),
}


@pytest.mark.parametrize(("shape", "values", "text"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_said_in_an_alert(page, shape, values, text):
    choose(page, "digits")
    page.get_by_label("Shape of input").fill(shape)
    page.get_by_label("Values of input").fill(values)
    page.get_by_role("button", name="Run").click()
    field = page.get_by_role("group", name="input")
    playwright.expect(field.get_by_role("alert").filter(has_text=text)).to_be_visible()
    playwright.expect(page.get_by_label("Values of input")).to_have_attribute("aria-invalid", "true")


def test_every_kind_of_value_is_written_and_read(page):
    choose(page, "kinds")
    half, brain = ["0.1", "65504", "6e-8"], ["0.1", "3e38", "-inf"]
    for name, text in {"flags": "true 0", "half": half, "brain": brain, "count": f"{2**62} {-(2**62)}"}.items():
        page.get_by_label(f"Values of {name}").fill(text if isinstance(text, str) else " ".join(text))
    assert page.get_by_label("Values of how").input_value() == "up"
    run(page)
    cells = {
        name: page.get_by_role("region", name=f"Values of {name}").locator("td:not(thead td)").all_inner_texts()
        for name in ("flags", "half", "brain", "count")
    }
    assert cells["flags"] == ["false", "true"]
    assert cells["count"] == [str(2**62 + 1), str(1 - 2**62)]
    for name, given, dtype in (("half", half, torch.float16), ("brain", brain, torch.bfloat16)):
        expected = torch.tensor([float(each) for each in given]).to(dtype) * 2
        got = torch.tensor([float(each) for each in cells[name]])
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=0)


def test_images_are_drawn(page):
    choose(page, "blurred")
    assert "too many to edit here" in page.get_by_role("group", name="picture").inner_text()
    run(page)
    expect_drawn(page, torch.linspace(0, 1, 6000).reshape(1, 3, 40, 50) ** 2)


def expect_drawn(page, x):
    got = page.get_by_role("img", name=re.compile("^Picture of output")).evaluate(
        "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    expected = Blurred()(x)[0].permute(1, 2, 0).numpy()
    expected = (expected - expected.min()) / (expected.max() - expected.min()) * 255
    np.testing.assert_allclose(np.reshape(got, (40, 50, 4))[..., :3], expected, atol=1)


def test_picture_of_the_user_is_sent(page):
    choose(page, "blurred")
    colours = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    rows = np.pad(colours[..., ::-1].reshape(40, 150), ((0, 0), (0, 2))).tobytes()
    bitmap = struct.pack("<2sIIIIiiHHIIiiII", b"BM", 54, 0, 54, 40, 50, -40, 1, 24, 0, len(rows), 0, 0, 0, 0) + rows
    page.get_by_text("Send a picture").click()
    page.get_by_label("Value of white in picture").fill("2")
    for name, content in (("words.txt", b"words"), ("picture.bmp", bitmap)):
        upload = page.get_by_label("Picture for picture")
        upload.set_input_files({"name": name, "mimeType": "image/bmp", "buffer": content})
        if name == "words.txt":
            alert = page.get_by_role("alert").filter(has_text="words.txt is no picture that the browser reads.")
            playwright.expect(alert).to_be_visible()
    playwright.expect(page.get_by_role("img", name=re.compile("^Picture of picture"))).to_have_attribute(
        "title", re.compile("from 0 .* to 2 ")
    )
    run(page)
    expect_drawn(page, torch.from_numpy(colours).permute(2, 0, 1)[None] / 255 * 2)


def test_models_have_addresses(page):
    choose(page, "kinds")
    page.reload()
    playwright.expect(page.get_by_role("heading", level=2)).to_have_text("kinds")
    page.goto(f"{page.url.partition('#')[0]}#digits")
    playwright.expect(page.get_by_role("heading", level=2)).to_have_text("digits")


def test_nan_is_shown_and_not_the_greatest(page):
    choose(page, "digits")
    playwright.expect(page.get_by_role("group", name="input")).to_contain_text("recorded from -1 to 1")
    page.get_by_label("Shape of input").fill("2, 8")
    page.get_by_label("Values of input").fill("nan" + " 0" * 15)
    run(page)
    assert np.isnan(table(page, "output")).tolist() == [[True] * 3, [False] * 3]
    assert page.locator("td.greatest").count() == 1


def test_page_is_used_by_keyboard_alone(page):
    playwright.expect(page.get_by_role("button", name="Run")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the model"
    assert any(
        page.keyboard.press("Tab") or page.evaluate("document.activeElement.dataset.model") == "digits"
        for _ in range(20)
    )
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("heading", level=2)).to_have_text("digits")
    assert page.evaluate("document.activeElement.dataset.model") == "digits"
    playwright.expect(page.get_by_label("Shape of input")).to_be_visible()
    assert any(page.keyboard.press("Tab") or page.evaluate("document.activeElement.id") == "run" for _ in range(20))
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("status").filter(has_text="Answered in")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "run"


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_page_meets_the_rules_of_accessibility(page, colours):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra `browser`")
    page.emulate_media(color_scheme=colours)
    for model in ("digits", "blurred"):
        choose(page, model)
        run(page)
        results = axe.Axe().run(page)
        assert results.response["violations"] == [], results.generate_report()
        assert len(results.response["passes"]) > 20


def test_copied_calls_give_the_answer(page, page_server):
    choose(page, "digits")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the curl command").click()
    playwright.expect(page.locator("#copied")).to_have_text("Copied.")
    command = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["bash", "-c", f"{command} -s"], capture_output=True, text=True, check=True)
    expected = eager(torch.linspace(-1, 1, 40).reshape(5, 8))
    np.testing.assert_allclose(json.loads(done.stdout)["outputs"][0]["data"], expected.ravel(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(printed_by(page.locator("#python").inner_text()), expected.ravel(), rtol=1e-4, atol=1e-5)
    choose(page, "kinds")
    assert page.locator("#curl").inner_text() == "# half is FP16, which JSON has no form for: see Python."
    assert printed_by(page.locator("#python").inner_text()).tolist() == [2] * 6 + [2, 3]


def printed_by(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return np.array(re.findall(r"-?[\d.]+(?:e-?\d+)?", done.stdout), np.float64)


def test_names_are_text_and_what_is_not_served_says_why(page):
    choose(page, HOSTILE)
    run(page)
    assert page.locator("img").count() == 0
    page.get_by_role("button", name=re.compile("^bundle")).click()
    playwright.expect(page.locator("#about")).to_contain_text("the bundle disagrees with eager execution")
    playwright.expect(page.get_by_role("button", name="Run")).to_be_hidden()
