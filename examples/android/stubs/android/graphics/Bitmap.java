package android.graphics;

import java.io.OutputStream;

public final class Bitmap {
    public enum CompressFormat { JPEG, PNG, WEBP }
    public boolean compress(CompressFormat format, int quality, OutputStream stream) { throw new RuntimeException(); }
}
