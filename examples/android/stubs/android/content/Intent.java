package android.content;

import android.net.Uri;

public class Intent {
    public static final String ACTION_OPEN_DOCUMENT = "android.intent.action.OPEN_DOCUMENT";
    public static final String CATEGORY_OPENABLE = "android.intent.category.OPENABLE";
    public Intent(String action) { throw new RuntimeException(); }
    public Intent addCategory(String category) { throw new RuntimeException(); }
    public Intent setType(String type) { throw new RuntimeException(); }
    public Uri getData() { throw new RuntimeException(); }
}
