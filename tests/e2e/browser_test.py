"""The report in a browser, which says nothing on its console."""

import pathlib
import re
import shutil
import subprocess

import pytest

from jaxrl_post.runtime import report
from tests.unit import report_runs

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Tells how wide the page is that it shows; a script of this test, not the page.
FRAME = """<iframe src="report.html" style="width:390px;height:844px"></iframe>
<p id="wide"></p><script>
const frame = document.querySelector("iframe");
frame.onload = () => document.getElementById("wide").textContent =
  "width " + frame.contentDocument.documentElement.scrollWidth;
</script>"""


def browse(page: pathlib.Path, *flags: str) -> tuple[str, str]:
  """Opens a page without any network; returns its elements and the log."""
  browser = next(filter(None, map(shutil.which, NAMES)), None)
  assert browser, f"expected one of {NAMES} on PATH. Debian: chromium."
  done = subprocess.run(
    [
      browser,
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--host-resolver-rules=MAP * ~NOTFOUND",
      "--enable-logging=stderr",
      "--allow-file-access-from-files",
      "--virtual-time-budget=5000",
      f"--user-data-dir={page.parent / 'profile'}",
      *flags,
      page.as_uri(),
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  return done.stdout, done.stderr


@pytest.mark.slow
def test_the_report_has_no_console_errors_and_fits_a_phone(tmp_path):
  run = report_runs.full(tmp_path / "run")
  report.report([run])
  page, log = browse(run / "report.html", "--dump-dom")
  assert "Composition" in page
  assert "CONSOLE" not in log
  # Or this would not have seen an error either.
  (run / "broken.html").write_text("<script>console.error('seen')</script>")
  assert "seen" in browse(run / "broken.html", "--dump-dom")[1]
  (run / "frame.html").write_text(FRAME)
  framed, _ = browse(run / "frame.html", "--dump-dom")
  width = re.search(r"width (\d+)", framed)
  assert width and int(width[1]) <= 390
