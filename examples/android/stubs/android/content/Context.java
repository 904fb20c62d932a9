package android.content;

import android.content.pm.ApplicationInfo;
import java.io.File;

public class Context {
    public ApplicationInfo getApplicationInfo() { throw new RuntimeException(); }
    public ContentResolver getContentResolver() { throw new RuntimeException(); }
    public File getCacheDir() { throw new RuntimeException(); }
    public File getFilesDir() { throw new RuntimeException(); }
    public File getExternalFilesDir(String type) { throw new RuntimeException(); }
    public final String getString(int resId) { throw new RuntimeException(); }
    public final String getString(int resId, Object... formatArgs) { throw new RuntimeException(); }
    public int checkSelfPermission(String permission) { throw new RuntimeException(); }
}
