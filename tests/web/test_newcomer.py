"""The page as a newcomer meets it: examples, a camera, the classes, one class against another."""

from bcosvit.web.session import difference
from tests.browser import screenshot
from tests.web.visitor import expect, facts, says, shown


def test_a_newcomer_needs_no_picture(page, service):
    page.click("#examples button:first-child")
    shown(page)
    says(page, "#views", "224" if service.predictor.transform.image_size == 224 else "16×16")
    expect(page.locator("#examples button")).to_have_count(3)
    expect(page.locator("#camera input[capture]")).to_have_count(1)
    screenshot(page, "example")


def test_what_the_model_knows(page, service):
    names = service.predictor.class_names
    page.click(".known summary")
    expect(page.locator(".known li:visible")).to_have_count(len(names))
    page.fill(".known input", names[1][:4].upper())
    left = [name for name in names if names[1][:4].lower() in name.lower()]
    expect(page.locator(".known li:visible")).to_have_count(len(left))
    screenshot(page, "classes")


def test_pictures_enlarge(page):
    page.click("#examples button:nth-child(2)")
    shown(page)
    small = page.locator("#views img").nth(1).bounding_box()["width"]
    page.locator("#views .enlarge").nth(1).click()
    assert page.locator("dialog.enlarged img").bounding_box()["width"] > 1.5 * small
    screenshot(page, "enlarged")
    page.keyboard.press("Escape")
    expect(page.locator("dialog.enlarged")).to_have_count(0)


def test_one_class_rather_than_another(page, service):
    names = service.predictor.class_names
    page.click("#examples button:first-child")
    shown(page)
    page.click("#versus input")
    page.keyboard.type(names[1])
    page.keyboard.press("Enter")
    says(page, "#title", f"rather than {names[1]}")
    got = facts(page, "#sums")
    total = got["Σ contributions"] + got["+ residual"] + got["+ bias"]
    assert abs(total - got["= logit"]) < 3e-4 and got["+ bias"] == 0
    screenshot(page, "rather")


def test_the_difference_is_exact(service, pictures):
    opened = service.open(pictures[0])
    both = [service.explain(opened, label) for label in (0, 1)]
    shown, sums = difference(*both)
    logits = service.predict(opened).logits
    assert abs(sums.logit - (logits[0] - logits[1]).item()) < 1e-4
    assert sums.completeness_error < 1e-3
    assert (shown.map - (both[0].map - both[1].map)).abs().max() == 0
