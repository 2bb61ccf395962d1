// The data of the dashboard lies in data.js: a page opened from a folder may not read other files of it.
(function ($) {
  "use strict";
  $.ajaxTransport("+*", function (options) {
    var path = decodeURIComponent(options.url.split("?")[0]);
    if (!Object.prototype.hasOwnProperty.call(window.STORED, path)) {
      return undefined;
    }
    return {
      send: function (headers, complete) {
        setTimeout(function () {
          complete(200, "OK", { text: window.STORED[path] });
        }, 0);
      },
      abort: function () {},
    };
  });
})(jQuery);
