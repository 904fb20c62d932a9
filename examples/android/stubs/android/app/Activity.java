package android.app;

import android.content.Context;
import android.content.Intent;
import android.os.Bundle;
import android.view.View;

public class Activity extends Context {
    public static final int RESULT_OK = -1;
    public Application getApplication() { throw new RuntimeException(); }
    public void setContentView(int layoutResID) { throw new RuntimeException(); }
    public <V extends View> V findViewById(int id) { throw new RuntimeException(); }
    protected void onCreate(Bundle savedInstanceState) { throw new RuntimeException(); }
    protected void onResume() { throw new RuntimeException(); }
    protected void onDestroy() { throw new RuntimeException(); }
    protected void onActivityResult(int requestCode, int resultCode, Intent data) { throw new RuntimeException(); }
    public void startActivityForResult(Intent intent, int requestCode) { throw new RuntimeException(); }
    public final void requestPermissions(String[] permissions, int requestCode) { throw new RuntimeException(); }
    public void onRequestPermissionsResult(int requestCode, String[] permissions, int[] grantResults) { throw new RuntimeException(); }
}
