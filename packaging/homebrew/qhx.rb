# The archives for Linux, as a formula: `cargo xtask release` fills it in.
class Qhx < Formula
  desc "Open runtime for QHexRT bundles on Hexagon NPUs"
  homepage "@URL@"
  version "@VERSION@"
  license any_of: ["MIT", "Apache-2.0"]

  depends_on :linux

  on_intel do
    url "@URL@/qhx-@VERSION@-x86_64-unknown-linux-gnu.tar.gz"
    sha256 "@x86_64-unknown-linux-gnu@"
  end
  on_arm do
    url "@URL@/qhx-@VERSION@-aarch64-unknown-linux-gnu.tar.gz"
    sha256 "@aarch64-unknown-linux-gnu@"
  end

  def install
    bin.install Dir["bin/*"]
    man1.install Dir["share/man/man1/*"]
    bash_completion.install "share/bash-completion/completions/qhx"
    fish_completion.install "share/fish/vendor_completions.d/qhx.fish"
    zsh_completion.install "share/zsh/site-functions/_qhx"
  end

  test do
    assert_match "The capital of France is", shell_output("#{bin}/qhx demo --backend cpu")
  end
end
